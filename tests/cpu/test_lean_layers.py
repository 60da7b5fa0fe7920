"""Which decoder layers our kernels compute, and that the rest is left to transformers' code."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama

from tests.lean import HEAD_DIM, TEXTS, check_equal, lean_layers, plain_logits
from tests.local_ranks import JoinedRanks, load_ranks
from tests.tiny_models import (
    BOUND,
    Feeder,
    error_in_std,
    forced_logits,
    load_executor,
    save_tiny_model,
)
from workers.layers.lean import GatedMLP
from workers.layers.packed import PackedWeights, SummedProduct
from workers.native.calls import load_kernels

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


@pytest.mark.parametrize(
    ("family", "num_lean"),
    [
        ("llama", 3),
        ("llama-biased", 3),
        pytest.param("mistral", 3, marks=pytest.mark.full),
        pytest.param("qwen2", 3, marks=pytest.mark.full),
        ("qwen3", 3),
        pytest.param("qwen3_moe", 3, marks=pytest.mark.full),
        pytest.param("gemma2", 3, marks=pytest.mark.full),
        ("gemma3", 4),
        ("smollm3", 2),  # a layer of three has no positions
        ("granite", 0),  # parts are scaled
        pytest.param("olmo2", 0, marks=pytest.mark.full),  # norms elsewhere
        ("cohere", 0),
        ("gpt2", 0),
        pytest.param("gpt_oss", 0, marks=pytest.mark.full),
        pytest.param("phi3", 0, marks=pytest.mark.full),
    ],
)
def test_families(tmp_path: Path, family: str, num_lean: int) -> None:
    changes = {} if family == "gpt2" else {"head_dim": HEAD_DIM}
    folder = save_tiny_model(tmp_path / family, family, **changes)
    executor = load_executor(folder)
    assert len(lean_layers(executor)) == num_lean
    check_equal(executor, folder)


@pytest.mark.parametrize("tp", [1, 2])
def test_nothing_is_left_to_modules(llama: Path, tp: int) -> None:
    with load_ranks(llama, tp=tp) as ranks:
        (layer, *_) = lean_layers(ranks[0].executor)
        assert isinstance(layer.parts.output, SummedProduct)
        assert isinstance(layer.parts.mlp, GatedMLP)
        assert (layer.parts.mlp.down.parallel is None) == (tp == 1)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_layers_in_bfloat16_are_recognised(tmp_path: Path, family: str) -> None:
    folder = save_tiny_model(tmp_path / family, family, head_dim=HEAD_DIM)
    executor = load_executor(folder, dtype="bfloat16")
    assert len(lean_layers(executor)) == executor._model.module.config.num_hidden_layers


@pytest.mark.parametrize("head_dim", [8, 24, 48])
def test_heads_that_vectors_do_not_divide(tmp_path: Path, head_dim: int) -> None:
    folder = save_tiny_model(tmp_path / "llama", head_dim=head_dim)
    executor = load_executor(folder)
    assert lean_layers(executor) == []
    check_equal(executor, folder)


def test_inner_sizes_that_vectors_do_not_divide(tmp_path: Path) -> None:
    """The MLP alone is transformers'."""
    folder = save_tiny_model(tmp_path / "llama", head_dim=HEAD_DIM, intermediate_size=100)
    executor = load_executor(folder)
    assert [type(each.parts.mlp).__name__ for each in lean_layers(executor)] == ["LlamaMLP"] * 3
    check_equal(executor, folder)


def times(factor: float) -> Callable[[Forward], Forward]:
    return lambda plain: lambda self, *inputs, **named: plain(self, *inputs, **named) * factor


def other_epsilon(plain: Forward) -> Forward:
    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(hidden.dtype)

    return forward


def scaled_queries(plain: Forward) -> Forward:
    def forward(self: nn.Module, hidden_states: torch.Tensor, **named: object) -> object:
        cosine, sine = named.pop("position_embeddings")
        return plain(self, hidden_states, position_embeddings=(cosine * 1.01, sine), **named)

    return forward


def adds_late(plain: Forward) -> Forward:
    def forward(
        self: nn.Module,
        hidden_states: torch.Tensor,
        position_embeddings: object = None,
        **named: object,
    ) -> torch.Tensor:
        output = plain(self, hidden_states, position_embeddings=position_embeddings, **named)
        return output + 0.05 * hidden_states.square()

    return forward


CHANGES = {
    "LlamaMLP": times(1.1),
    "LlamaAttention": scaled_queries,
    "LlamaDecoderLayer": adds_late,
    "LlamaRMSNorm": other_epsilon,
}


@pytest.mark.parametrize("kind", [*CHANGES])
def test_names_alone_are_not_enough(
    kind: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = getattr(modeling_llama, kind)
    monkeypatch.setattr(module, "forward", CHANGES[kind](module.forward))
    executor = load_executor(llama)
    assert lean_layers(executor) == []
    check_equal(executor, llama)


@pytest.mark.parametrize("kind", ["LlamaMLP", "LlamaRMSNorm"])
def test_nor_are_they_in_bfloat16(kind: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = getattr(modeling_llama, kind)
    monkeypatch.setattr(module, "forward", CHANGES[kind](module.forward))
    assert lean_layers(load_executor(llama, dtype="bfloat16")) == []


def test_gates_that_are_cut_off_are_noticed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no token of a dry run may have one so large."""

    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(hidden).clamp(max=50), self.up_proj(hidden)
        return self.down_proj(functional.silu(gate) * up)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    executor = load_executor(llama)
    assert [type(each.parts.mlp).__name__ for each in lean_layers(executor)] == ["LlamaMLP"] * 3


def as_pair(plain: Forward) -> Forward:
    def forward(
        self: nn.Module, hidden_states: torch.Tensor, position_embeddings: object, **named: object
    ) -> object:
        output = plain(self, hidden_states, position_embeddings=position_embeddings, **named)
        return output, None

    return forward


def by_position_alone(plain: Forward) -> Forward:
    """Cosine and sine come under another name."""

    def forward(self: nn.Module, hidden_states: torch.Tensor, **named: object) -> object:
        return plain(self, hidden_states, **named)

    return forward


def wide_turns(plain: Forward) -> Forward:
    """In other numbers than the model's, and of two rows for all."""

    def forward(self: nn.Module, *inputs: object, **named: object) -> object:
        return tuple(each.double() for each in plain(self, *inputs, **named))

    return forward


def in_pairs(plain: Forward) -> Forward:
    def forward(self: nn.Module, *inputs: object, **named: object) -> object:
        return tuple(each[None].expand(3, -1, -1, -1) for each in plain(self, *inputs, **named))

    return forward


def test_layers_that_answer_with_a_pair_are_left_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = modeling_llama.LlamaDecoderLayer
    plain = layer.__call__
    monkeypatch.setattr(layer, "forward", as_pair(layer.forward))
    monkeypatch.setattr(layer, "__call__", lambda *inputs, **named: plain(*inputs, **named)[0])
    executor = load_executor(llama)
    assert lean_layers(executor) == []
    check_equal(executor, llama)


def test_turns_under_another_name_are_left_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = modeling_llama.LlamaDecoderLayer
    monkeypatch.setattr(layer, "forward", by_position_alone(layer.forward))
    executor = load_executor(llama)
    assert lean_layers(executor) == []
    check_equal(executor, llama)


@pytest.mark.parametrize("change", [wide_turns, in_pairs])
def test_turns_of_another_kind_are_left_alone(
    llama: Path, change: Callable[[Forward], Forward], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels would take their addresses for something else."""
    rotary = modeling_llama.LlamaRotaryEmbedding
    monkeypatch.setattr(rotary, "forward", change(rotary.forward))
    plain = modeling_llama.apply_rotary_pos_emb

    def apply(query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor):
        pair = [each[0] if each.dim() == 4 else each.float() for each in (cosine, sine)]
        return plain(query, key, *pair)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply)
    executor = load_executor(llama)
    assert lean_layers(executor) == []
    check_equal(executor, llama)


def test_an_mlp_may_answer_with_a_view(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which a kernel would read the storage, in its order."""

    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        gated = functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden) * 1.1
        return self.down_proj(gated).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    executor = load_executor(llama)
    assert len(lean_layers(executor)) == 3
    check_equal(executor, llama)


def test_an_mlp_may_answer_in_other_numbers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(
        modeling_llama.LlamaMLP, "forward", lambda self, hidden: plain(self, hidden).double() * 1.1
    )
    monkeypatch.setattr(
        modeling_llama.LlamaRMSNorm,
        "forward",
        lambda self, hidden: functional.rms_norm(
            hidden.float(), self.weight.shape, self.weight, self.variance_epsilon
        ),
    )
    executor = load_executor(llama)
    assert lean_layers(executor) == []
    check_equal(executor, llama)


def packed(module: nn.Module) -> bool:
    method = module.method
    return isinstance(method, PackedWeights) and method.packed is not None


def test_weights_that_a_model_reads_by_itself_stay_as_they_are(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        gate = functional.linear(hidden, self.gate_proj.weight)
        return self.down_proj(functional.silu(gate) * self.up_proj(hidden))

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    executor = load_executor(llama)
    mlp = executor._model.module.model.layers[0].mlp
    assert not packed(mlp.gate_proj)
    assert packed(mlp.up_proj)
    assert packed(mlp.down_proj)
    check_equal(executor, llama)


def test_a_tied_embedding_keeps_its_weight(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "llama", head_dim=HEAD_DIM, tie_word_embeddings=True)
    executor = load_executor(folder)
    model = executor._model.module
    assert packed(model.get_output_embeddings())
    assert model.get_input_embeddings().weight.shape[1] == 64
    check_equal(executor, folder)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ranks_agree_with_torch(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / family, family, head_dim=HEAD_DIM)
    expected = plain_logits(folder)

    def logits(*, num_lean: int) -> list[torch.Tensor]:
        with load_ranks(folder, tp=2) as ranks:
            assert [len(lean_layers(rank.executor)) for rank in ranks] == [num_lean] * 2
            return forced_logits(Feeder(JoinedRanks(ranks)), TEXTS)

    lean = logits(num_lean=4 if family == "gemma3" else 3)
    monkeypatch.setattr("workers.layers.linear_methods.linear_kernel", lambda _: None)
    monkeypatch.setattr("workers.models.lean_layers.decoder_kernels", lambda _: None)
    plain = logits(num_lean=0)
    assert error_in_std(lean, plain) <= BOUND
    assert error_in_std(lean, expected) <= BOUND
    for mine, theirs in zip(lean, plain, strict=True):
        assert mine.argmax(-1).equal(theirs.argmax(-1))
