"""Which models run without the code around their layers, and that others keep it."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from tests.lean import HEAD_DIM, TEXTS, check_equal, lean_layers
from tests.local_ranks import JoinedRanks, load_ranks
from tests.tiny_models import Feeder, forced_logits, load_executor, save_tiny_model
from workers.model_executor import ModelExecutor
from workers.models import lean_layers as lean_layers_of_models
from workers.models import lean_model
from workers.native.calls import load_kernels
from workers.native.decoder import DecoderKernels, decoder_kernels

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(
        not load_kernels("decoder").has_vectors(), reason="the kernels want AVX-512 or AVX2"
    ),
]

Forward = Callable[..., object]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "llama", head_dim=HEAD_DIM)


def is_lean(executor: ModelExecutor) -> bool:
    return executor._model._lean is not None


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", True),
        pytest.param("llama-biased", True, marks=pytest.mark.full),
        pytest.param("mistral", True, marks=pytest.mark.full),
        pytest.param("qwen3", True, marks=pytest.mark.full),
        pytest.param("qwen3_moe", True, marks=pytest.mark.full),
        ("gemma3", True),  # two rotary embeddings, embeddings that are scaled
        pytest.param("gemma2", False, marks=pytest.mark.full),  # logits are capped
        ("smollm3", False),  # a layer of three isn't lean
        pytest.param("gpt2", False, marks=pytest.mark.full),
    ],
)
def test_families(tmp_path: Path, family: str, expected: bool) -> None:
    changes = {} if family == "gpt2" else {"head_dim": HEAD_DIM}
    folder = save_tiny_model(tmp_path / family, family, **changes)
    executor = load_executor(folder)
    assert is_lean(executor) == expected
    check_equal(executor, folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_logits_are_those_of_the_models_own_code(llama: Path, dtype: str) -> None:
    executor = load_executor(llama, dtype=dtype)
    lean = forced_logits(Feeder(executor), TEXTS)
    executor._model._lean = None
    for mine, theirs in zip(lean, forced_logits(Feeder(executor), TEXTS), strict=True):
        # The last norm is by our kernel: a last bit or two.
        bound = 1e-5 if dtype == "float32" else 0.02
        assert (mine - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("tp", [2])
def test_ranks_run_it_too(llama: Path, tp: int) -> None:
    alone = forced_logits(Feeder(load_executor(llama)), TEXTS)
    with load_ranks(llama, tp=tp) as ranks:
        assert all(is_lean(rank.executor) for rank in ranks)
        for mine, theirs in zip(
            forced_logits(Feeder(JoinedRanks(ranks)), TEXTS), alone, strict=True
        ):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_ranks_of_which_one_has_no_kernels_agree(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run sums over ranks: none may begin one that another leaves out."""
    asked: list[str] = []

    def for_one_alone(dtype: torch.dtype) -> DecoderKernels | None:
        asked.append(threading.current_thread().name)
        return decoder_kernels(dtype) if asked[-1] == asked[0] else None

    monkeypatch.setattr(lean_layers_of_models, "decoder_kernels", for_one_alone)
    monkeypatch.setattr(lean_model, "decoder_kernels", for_one_alone)
    with load_ranks(llama, tp=2) as ranks:
        assert len(set(asked)) == 2
        assert not any(is_lean(rank.executor) or lean_layers(rank.executor) for rank in ranks)


def scaled_logits(plain: Forward) -> Forward:
    def forward(self: nn.Module, *inputs: object, **named: object) -> object:
        output = plain(self, *inputs, **named)
        output.logits = output.logits * 1.0001  # less than any bound of rounding
        return output

    return forward


def scaled_embeddings(plain: Forward) -> Forward:
    """Behind the module, in front of the first layer."""

    def forward(
        self: nn.Module,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **named: object,
    ) -> object:
        return plain(self, inputs_embeds=self.embed_tokens(input_ids) * 2.0, **named)

    return forward


def skipped_norm(plain: Forward) -> Forward:
    def forward(self: nn.Module, *inputs: object, **named: object) -> object:
        before = self.norm
        try:
            self.norm = nn.Identity()
            return plain(self, *inputs, **named)
        finally:
            self.norm = before

    return forward


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("LlamaForCausalLM", scaled_logits),
        ("LlamaModel", scaled_embeddings),
        ("LlamaModel", skipped_norm),
    ],
)
def test_code_that_does_more_stays(
    kind: str,
    change: Callable[[Forward], Forward],
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = getattr(modeling_llama, kind)
    monkeypatch.setattr(module, "forward", change(module.forward))
    executor = load_executor(llama)
    assert len(lean_layers(executor)) == 3
    assert not is_lean(executor)
    check_equal(executor, llama)
