"""With --deterministic a row's bits are a function of its sequence alone."""

import random
from collections.abc import Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch

from runtime.sampling_params import SamplingParams
from tests.asks import KINDS, batch_mates, draw_prompt, save_model
from tests.families import VOCABULARY
from tests.local_ranks import JoinedRanks, load_ranks
from tests.quick import quick
from tests.tiny_engine import Ask, TinyEngine, check_equal
from tests.tiny_models import Feeder, load_executor, make_batch, save_tiny_model
from workers import model_part
from workers.errors import ModelError
from workers.layers.row_forwards import WholeVectors
from workers.layers.row_tiles import TILE_ROWS, tiled_linear

pytestmark = pytest.mark.cpu

FAMILIES = ["llama", "qwen3", "gemma3", "gpt2"]
DTYPES = ["float32", "bfloat16"]
LENGTHS = (47, 3, 21, 33, 10)

every_family = pytest.mark.parametrize("family", quick(FAMILIES, "llama"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(root / family, family) for family in FAMILIES}


def draw_texts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]


@contextmanager
def loaded(folder: Path, *, dtype: str = "float32", deterministic: bool = True, **changes: object):
    with load_ranks(folder, dtype=dtype, deterministic=deterministic, **changes) as ranks:
        yield Feeder(JoinedRanks(ranks), num_blocks=1024)


class Texts:
    """Feeds texts in pieces, each under a number of its own, and keeps all logits [len, V]."""

    def __init__(self, feeder: Feeder, texts: Sequence[Sequence[int]], first_id: int) -> None:
        self._feeder = feeder
        self._texts = texts
        self._first_id = first_id
        self._fed = [0] * len(texts)
        self.logits: list[list[torch.Tensor]] = [[] for _ in texts]

    def feed(self, *parts: tuple[int, int]) -> None:
        """Each of (text, tokens of it) in one batch."""
        rows = []
        for number, count in parts:
            start = self._fed[number]
            piece = self._texts[number][start : start + count]
            self._fed[number] += len(piece)
            places = range(len(piece))
            rows.append(self._feeder.row(self._first_id + number, piece, sample=places))
        logits = self._feeder.executor.compute_logits(make_batch(rows))
        pieces = logits.split([len(row.tokens) for row in rows])
        for (number, _), piece in zip(parts, pieces, strict=True):
            self.logits[number].append(piece.clone())

    def left(self) -> list[tuple[int, int]]:
        lengths = [len(text) - fed for text, fed in zip(self._texts, self._fed, strict=True)]
        return [(number, length) for number, length in enumerate(lengths) if length]

    def joined(self) -> list[torch.Tensor]:
        return [torch.cat(pieces) for pieces in self.logits]


def token_by_token(feeder: Feeder, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    fed = Texts(feeder, texts, 0)
    for number, text in enumerate(texts):
        for _ in text:
            fed.feed((number, 1))
    return fed.joined()


def in_one_piece(feeder: Feeder, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    fed = Texts(feeder, texts, 100)
    for number, text in enumerate(texts):
        fed.feed((number, len(text)))
    return fed.joined()


def in_random_batches(
    feeder: Feeder, texts: Sequence[Sequence[int]], seed: int
) -> list[torch.Tensor]:
    """Some texts at a time in any order, cut anywhere."""
    draw = random.Random(seed)
    fed = Texts(feeder, texts, 1000 * (seed + 1))
    while left := fed.left():
        chosen = draw.sample(left, draw.randrange(1, len(left) + 1))
        fed.feed(*((number, draw.randrange(1, length + 1)) for number, length in chosen))
    return fed.joined()


def num_different(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> int:
    """Tokens whose logits have other bits."""
    pairs = zip(found, expected, strict=True)
    return sum(int((mine != theirs).any(dim=-1).sum()) for mine, theirs in pairs)


@pytest.mark.parametrize(
    ("dtype", "tp"), quick(product(DTYPES, [1, 2]), ("float32", 1), ("bfloat16", 2))
)
@every_family
def test_bits_are_the_same_however_texts_are_fed(folders, family, dtype, tp):
    texts = draw_texts(1)
    with loaded(folders[family], tp=tp, dtype=dtype) as feeder:
        expected = token_by_token(feeder, texts)

        assert num_different(in_one_piece(feeder, texts), expected) == 0
        for seed in range(3):
            assert num_different(in_random_batches(feeder, texts, seed), expected) == 0


@pytest.mark.parametrize("dtype", quick(DTYPES, "bfloat16"))
@every_family
def test_several_threads_change_nothing(folders, family, dtype):
    """Beside one thread's bits nothing is claimed: only that rows don't matter."""
    texts = draw_texts(2)
    with loaded(folders[family], dtype=dtype) as feeder:
        torch.set_num_threads(3)
        try:
            expected = token_by_token(feeder, texts)
            assert num_different(in_one_piece(feeder, texts), expected) == 0
            assert num_different(in_random_batches(feeder, texts, 3), expected) == 0
        finally:
            torch.set_num_threads(1)


@pytest.mark.full
def test_without_the_option_bits_differ(folders):
    """Else the tests above would show nothing."""
    texts = draw_texts(1)
    differing = 0
    for family in FAMILIES:
        for dtype in DTYPES:
            with loaded(folders[family], dtype=dtype, deterministic=False) as feeder:
                expected = token_by_token(feeder, texts)
                differing += num_different(in_one_piece(feeder, texts), expected)
    if not differing:
        pytest.skip("this machine's kernels give a row the same bits in any batch")
    assert differing > 100


@pytest.mark.full
def test_also_with_weights_and_cache_in_fp8(folders):
    texts = draw_texts(3)
    formats = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    with loaded(folders["llama"], dtype="bfloat16", **formats) as feeder:
        expected = token_by_token(feeder, texts)

        assert num_different(in_one_piece(feeder, texts), expected) == 0
        assert num_different(in_random_batches(feeder, texts, 5), expected) == 0


@pytest.fixture(scope="module")
def sampled_folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("sampled") / "llama", "llama")


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_seeded_requests_get_the_same_tokens_in_bfloat16(sampled_folder, tp):
    """Logprobs, too, to the last bit."""
    kinds = {
        name: KINDS[name]
        for name in ("temperature", "top-p", "top-k and top-p", "everything", "n", "min-p")
    }
    mates = [ask for ask in batch_mates(4) if ask.params.regex is None]
    greedy = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=2)
    kinds["greedy"] = Ask(prompt=draw_prompt(40, 3), params=greedy, seed=1)
    with load_ranks(sampled_folder, tp=tp, dtype="bfloat16", deterministic=True) as ranks:
        alone = {name: TinyEngine(ranks).run(ask)[0] for name, ask in kinds.items()}
        served = TinyEngine(ranks, long_prefill_token_threshold=7)

        together = served.run(*kinds.values(), *mates)

    for name, answers in zip(kinds, together, strict=False):
        check_equal(answers, alone[name])
        assert [each.logprobs for each in answers] == [each.logprobs for each in alone[name]]
    assert served.most_together >= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"), [(64, 96), (7, 5), (33, 4), (127, 9), (257, 1), (640, 211)]
)
def test_products_are_those_of_their_rows(num_inputs, num_outputs, dtype):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    rows = torch.randn(2 * TILE_ROWS + 5, num_inputs, generator=generator).to(dtype)

    together = tiled_linear(rows, weight, bias)

    for start, stop in ((0, 1), (1, 2), (5, 40), (31, 33), (60, 69)):
        assert torch.equal(tiled_linear(rows[start:stop], weight, bias), together[start:stop])
    expected = rows.double() @ weight.double().T + bias.double()
    assert torch.allclose(together.double(), expected, rtol=0.02, atol=0.02 * num_inputs**0.5)
    shaped = tiled_linear(rows[:6].view(1, 2, 3, -1), weight, None)
    assert shaped.shape == (1, 2, 3, num_outputs)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("size", [3, 96, 130, 3000])
def test_elementwise_functions_are_those_of_their_elements(size, num_threads):
    values = torch.randn(41, size, generator=torch.Generator().manual_seed(size))
    function = WholeVectors(torch.nn.functional.silu)
    torch.set_num_threads(num_threads)
    try:
        together = function(values)
        alone = torch.cat([function(row) for row in values.split(1)])
    finally:
        torch.set_num_threads(1)

    assert torch.equal(together, alone)
    assert torch.allclose(together, torch.nn.functional.silu(values))


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("mixtral", "MixtralTopKRouter"),
        ("gpt_oss", "GptOssTopKRouter"),
        ("qwen3_moe", "Qwen3MoeExperts"),
    ],
)
def test_experts_are_refused_by_name(tmp_path, family, module):
    folder = save_tiny_model(tmp_path / family, family)

    with pytest.raises(ModelError, match=rf"{module} .*serve it without --deterministic"):
        load_executor(folder, deterministic=True)


def test_a_module_that_mixes_rows_is_named(tmp_path, monkeypatch):
    """What the rules don't know the dry run finds: a norm that depends on how many rows it gets."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    plain = LlamaRMSNorm.forward

    def by_count(self, hidden_states):
        return plain(self, hidden_states) * (1 + 1e-6 * (hidden_states.shape[1] > 6))

    monkeypatch.setattr(LlamaRMSNorm, "forward", by_count)
    # Our kernels would compute it as others do, within what a comparison forgives.
    monkeypatch.setattr(model_part, "use_lean_layers", lambda *_, **__: 0)
    folder = save_tiny_model(tmp_path / "llama", "llama")
    load_executor(folder)

    with pytest.raises(ModelError, match=r"LlamaRMSNorm \(model.layers.0.input_layernorm\) gives"):
        load_executor(folder, deterministic=True)


@pytest.mark.full
def test_a_function_whose_bits_depend_on_threads_is_found(tmp_path, monkeypatch):
    """No module of its own: torch computes a number in a thread's last vector in another way."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def gated(self, hidden_states):
        return plain(self, hidden_states) * torch.sigmoid(hidden_states)

    monkeypatch.setattr(LlamaMLP, "forward", gated)
    # Half of 997 rows of 112 is no multiple of 16, of which AVX2's loops take as many at a time.
    folder = save_tiny_model(tmp_path / "llama", "llama", hidden_size=112, head_dim=16)
    try:
        with pytest.raises(ModelError, match=r"a function of its own \(token \d+ of 997\)"):
            load_executor(folder, deterministic=True, num_threads=2)
    finally:
        torch.set_num_threads(1)
