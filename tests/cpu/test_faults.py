"""What goes wrong in one row ends its request alone; what isn't a token is never sampled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch

from runtime.errors import InvalidRequestError, LockstepError, ModelOutputError
from runtime.grammar.compiler import GrammarCompiler
from runtime.sampling_params import SamplingParams
from tests.asks import EOS, KINDS, VOCAB_SIZE, batch_mates, draw_prompt, save_model
from tests.families import VOCABULARY
from tests.local_ranks import Rank, load_ranks
from tests.quick import full, quick
from tests.tiny_engine import Ask, TinyEngine, WaitingCompiler, check_equal
from tests.tiny_models import load_executor, save_tiny_model
from workers.errors import ModelError

pytestmark = pytest.mark.cpu

VICTIM = 3  # which request of its batch
ENDLESS = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
DAMAGES: dict[str, Callable[[torch.Tensor], object]] = {
    "nan": lambda row: row[17].fill_(float("nan")),
    "inf": lambda row: row[17].fill_(float("inf")),
    "all -inf": lambda row: row.fill_(float("-inf")),
    "all nan": lambda row: row.fill_(float("nan")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def ranks(folder) -> Iterator[list[Rank]]:
    with load_ranks(folder) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def compiler(folder) -> Iterator[WaitingCompiler]:
    compiler = GrammarCompiler(str(folder), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    yield WaitingCompiler(compiler)
    compiler.close()


@contextmanager
def damaged(
    served: TinyEngine, rank: Rank, damage: Callable[[torch.Tensor], object], *, position: int
) -> Iterator[None]:
    """The head's output is damaged where the victim gets its token at `position`."""

    def hook(module: torch.nn.Module, inputs: object, logits: torch.Tensor) -> None:
        batch = served.executor.batch
        for row, (index, place) in enumerate(
            zip(batch.sample_sequence.tolist(), batch.sample_index.tolist(), strict=True)
        ):
            is_victim = served.owner(batch.sequence_ids[index]) == VICTIM
            if is_victim and batch.positions[place] + 1 == position:
                damage(logits.view(-1, logits.shape[-1])[row])

    head = rank.executor._model.module.get_output_embeddings()
    handle = head.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def check_alone(served: TinyEngine, error: type[LockstepError], words: str) -> None:
    """The victim has failed, and nobody else."""
    assert list(served.failures) == [VICTIM]
    assert isinstance(served.failures[VICTIM], error)
    assert words in str(served.failures[VICTIM])


@pytest.mark.parametrize(
    ("num_output", "damage"), quick(product([0, 5], DAMAGES), (0, "nan"), (5, "inf"))
)
def test_damaged_logits_end_their_request_alone(ranks, compiler, damage, num_output) -> None:
    """After so many tokens of its output."""
    asks = batch_mates(seed=3)
    victim = Ask(prompt=draw_prompt(20, 1), params=ENDLESS)
    alone = TinyEngine(ranks, compiler=compiler).run(*asks)
    served = TinyEngine(ranks, compiler=compiler)

    with damaged(served, ranks[0], DAMAGES[damage], position=20 + num_output):
        together = served.run(*asks[:VICTIM], victim, *asks[VICTIM:])

    check_alone(served, ModelOutputError, "NaN or infinite")
    assert len(served.answers[VICTIM, 0].token_ids) == num_output
    for mine, theirs in zip(together[:VICTIM] + together[VICTIM + 1 :], alone, strict=True):
        check_equal(mine, theirs)
    stats = served.engine.stats()
    assert (stats.num_invalid_logits, stats.num_empty_supports) == (1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_logits_are_noticed_whatever_is_asked_for(ranks, compiler, kind) -> None:
    """With several choices too, of which each has a row; the request fails once."""
    ask = KINDS[kind]
    mates = [Ask(prompt=[5 + n], params=ENDLESS, seed=n) for n in range(VICTIM)]
    served = TinyEngine(ranks, compiler=compiler)

    with damaged(served, ranks[0], DAMAGES["nan"], position=len(ask.prompt) + 2):
        served.run(*mates, ask)

    check_alone(served, ModelOutputError, "NaN or infinite")
    assert all(served.answers[mate, 0].finish_reason for mate in range(VICTIM))
    assert served.engine.stats().num_invalid_logits == 1
    assert not served.scheduler.has_work


def empty(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | fields)


@pytest.mark.parametrize(
    ("params", "bad_words", "num_output"),
    [
        full((empty(allowed_token_ids=(5, 6)), ((5,), (6,)), 0)),
        (empty(allowed_token_ids=(5,)), ((5, 5, 5),), 2),
        full((empty(allowed_token_ids=(5,), temperature=0), ((5, 5),), 1)),
        full((empty(allowed_token_ids=(EOS,), min_tokens=4, ignore_eos=False), (), 0)),
        full((empty(allowed_token_ids=(7,), min_tokens=4, stop_token_ids=(7,)), (), 0)),
        (empty(regex="ab", ignore_eos=False, allowed_token_ids=(5,)), (), 0),
    ],
    ids=["forbidden", "forbidden later", "greedy", "ends", "stop tokens", "structure"],
)
def test_where_no_token_is_left_the_request_ends_alone(
    ranks, compiler, params, bad_words, num_output
) -> None:
    asks = batch_mates(seed=4)
    victim = Ask(prompt=draw_prompt(20, 2), params=params, bad_words=bad_words)
    alone = TinyEngine(ranks, compiler=compiler).run(*asks)
    served = TinyEngine(ranks, compiler=compiler)

    together = served.run(*asks[:VICTIM], victim, *asks[VICTIM:])

    check_alone(served, InvalidRequestError, "no token is left to sample")
    assert len(served.answers[VICTIM, 0].token_ids) == num_output
    for mine, theirs in zip(together[:VICTIM] + together[VICTIM + 1 :], alone, strict=True):
        check_equal(mine, theirs)
    stats = served.engine.stats()
    assert (stats.num_invalid_logits, stats.num_empty_supports) == (0, 1)


HOT: list[dict] = [
    {"top_p": 0.9999},
    {"top_k": 10_000},
    {"min_p": 1e-6},
    {"logprobs": 20},
]


def draw_hot(ranks: list[Rank], *kinds: dict) -> list[set[int]]:
    """The tokens of 800 draws of each kind, and those told as the most probable ones."""
    asks = [
        Ask(
            prompt=[3],
            params=SamplingParams(max_tokens=100, ignore_eos=True, n=8, temperature=100.0, **kind),
            seed=number,
        )
        for number, kind in enumerate(kinds)
    ]
    num_seqs = 8 * len(asks)
    served = TinyEngine(ranks, max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs)
    return [
        {token for each in answers for token in each.token_ids}
        | {token for each in answers for told in each.logprobs for token in told.top_token_ids}
        for answers in served.run(*asks)
    ]


@pytest.mark.full
def test_what_ranks_fill_their_shards_with_is_no_token(tmp_path) -> None:
    """The vocabulary is a prime; of two ranks the second has a row more than there are tokens."""
    last = {"allowed_token_ids": tuple(range(VOCABULARY - 3, VOCABULARY))}
    with load_ranks(save_tiny_model(tmp_path), tp=2) as ranks:
        assert ranks[0].executor.spec.vocab_size == VOCABULARY
        for tokens in draw_hot(ranks, *HOT, last):
            assert max(tokens) == VOCABULARY - 1


@pytest.mark.parametrize(
    ("num_embeddings", "eos"),
    [
        (456, EOS),
        full((456, 430)),
        full((470, 1000)),
    ],
)
def test_ids_past_the_tokenizer_are_no_tokens(tmp_path, num_embeddings, eos) -> None:
    """Checkpoints round their embeddings up. An end of texts is a token in any case."""
    folder = save_model(
        tmp_path / "padded", "llama", vocab_size=num_embeddings, eos_token_id=[EOS, eos]
    )
    num_tokens = VOCAB_SIZE if eos == EOS else min(eos + 1, num_embeddings)
    with load_ranks(folder) as ranks:
        assert ranks[0].executor.spec.vocab_size == num_tokens
        for tokens in draw_hot(ranks, *HOT):
            assert num_tokens - 20 < max(tokens) < num_tokens


def test_a_file_that_is_no_tokenizer_is_named(tmp_path) -> None:
    folder = save_model(tmp_path / "broken", "llama")
    (folder / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(ModelError, match=r"tokenizer\.json is no tokenizer: KeyError\('vocab'\)"):
        load_executor(folder)
