"""Weights and KV cache in 8 bits."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.local_ranks import JoinedRanks, load_ranks
from tests.quick import quick
from tests.tiny_models import (
    Feeder,
    error_in_std,
    forced_logits,
    load_executor,
    make_layout,
    save_tiny_model,
)
from workers.attention import choice, write
from workers.attention.reference import ReferenceAttention
from workers.errors import ModelError
from workers.kv_cache import as_cached
from workers.loading import quantising

pytestmark = pytest.mark.cpu

FAMILIES = ["llama", "llama-biased", "gemma3", "gpt2", "phi3"]
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: save_tiny_model(root / family, family) for family in FAMILIES}


def linears(model: nn.Module) -> list[nn.Module]:
    head = model.get_output_embeddings()
    return [
        module
        for module in model.modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head
    ]


def save_dequantised(folder: Path, target: Path) -> Path:
    """The same model with each linear weight as 8 bits and a scale would have it, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in linears(model):
            weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
            for output in weight:  # a view: written in place
                scale = output.abs().max() / 448
                output.copy_((output / scale).clamp(-448, 448).to(FP8).float() * scale)
    model.save_pretrained(target)
    return target


def logits_of(folder: Path, *, tp: int = 1, **changes: object) -> list[torch.Tensor]:
    texts = [[n * 7 % 200 for n in range(35)], [n * 11 % 190 for n in range(19)]]
    with load_ranks(folder, tp=tp, **changes) as ranks:
        found = forced_logits(Feeder(JoinedRanks(ranks)), texts)
    assert found is not None
    return found


@pytest.mark.usefixtures("torch_products")
@pytest.mark.parametrize(
    ("family", "tp"), quick(product(FAMILIES, [1, 2]), ("llama", 2), ("gpt2", 1), ("phi3", 1))
)
def test_weights_are_those_of_the_dequantised_model(folders, family, tp, tmp_path):
    """To the last bit, also where ranks have parts of the inputs: a scale is of the whole row."""
    plain = save_dequantised(folders[family], tmp_path / family)

    found = logits_of(folders[family], tp=tp, quantization="fp8")

    for mine, theirs in zip(found, logits_of(plain, tp=tp), strict=True):
        assert torch.equal(mine, theirs)
    assert error_in_std(found, logits_of(folders[family], tp=tp)) > 1e-3  # it isn't the original


def test_outputs_are_quantised_a_few_at_a_time(folders, monkeypatch):
    expected = logits_of(folders["gpt2"], quantization="fp8")
    sizes = []
    find_scale = quantising.find_scale
    monkeypatch.setattr(quantising, "OUTPUTS", 10)
    monkeypatch.setattr(
        quantising, "find_scale", lambda part: sizes.append(len(part)) or find_scale(part)
    )

    found = logits_of(folders["gpt2"], quantization="fp8")

    assert all(map(torch.equal, found, expected))
    assert max(sizes) == 10


@pytest.mark.parametrize("family", quick(FAMILIES, "llama", "gpt2"))
def test_a_weight_takes_a_byte(folders, family):
    model = AutoModelForCausalLM.from_pretrained(folders[family])
    num_weights = sum(layer.weight.numel() for layer in linears(model))
    num_outputs = sum(
        layer.weight.shape[1 if isinstance(layer, Conv1D) else 0] for layer in linears(model)
    )

    whole = load_executor(folders[family], dtype="bfloat16").spec.parameter_bytes
    small = load_executor(folders[family], dtype="bfloat16", quantization="fp8").spec
    noise = load_executor(
        folders[family], dtype="bfloat16", quantization="fp8", random_weights=True
    ).spec

    assert small.parameter_bytes == whole - num_weights + 4 * num_outputs
    assert noise.parameter_bytes == small.parameter_bytes


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_are_not_quantised(tmp_path, family):
    folder = save_tiny_model(tmp_path / family, family)

    with pytest.raises(ModelError, match=r"Experts .*serve it with --quantization none"):
        load_executor(folder, quantization="fp8")


def test_a_quantised_checkpoint_is_refused(folders, tmp_path):
    folder = save_tiny_model(tmp_path / "llama", "llama", quantization_config={"quant_method": "x"})

    with pytest.raises(ModelError, match="use an unquantised checkpoint"):
        load_executor(folder, quantization="fp8")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quantization": "int3"}, "quantization=int3 must be none or fp8"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype=fp4 must be auto or fp8"),
    ],
)
def test_unknown_formats_are_refused(folders, changes, sentence):
    with pytest.raises(ModelError, match=sentence):
        load_executor(folders["llama"], **changes)


@pytest.mark.parametrize(
    ("dtype", "family"),
    quick(product(["float32", "bfloat16"], FAMILIES), ("float32", "llama"), ("bfloat16", "gemma3")),
)
def test_the_cache_keeps_what_it_is_given_rounded(folders, family, dtype, monkeypatch):
    options = {"dtype": dtype, "attention": "reference"}
    found = logits_of(folders[family], **options, kv_cache_dtype="fp8")
    exact = logits_of(folders[family], **options)

    def rounded(values, dtype):
        return values.float().clamp(-448, 448).to(FP8).to(dtype)

    monkeypatch.setattr(write, "as_cached", rounded)

    for mine, theirs in zip(found, logits_of(folders[family], **options), strict=True):
        assert torch.equal(mine, theirs)
    assert error_in_std(found, exact) > 1e-3


def test_the_cache_takes_a_byte_a_number(folders):
    sizes = {}
    for name in ("auto", "fp8"):
        executor = load_executor(folders["llama"], dtype="bfloat16", kv_cache_dtype=name)
        sizes[name] = executor.allocate_cache(make_layout(executor.spec, num_blocks=64))
        element_bytes = {layer.element_bytes for layer in executor.spec.layers}
        assert element_bytes == {1 if name == "fp8" else 2}
    assert sizes["fp8"] * 2 == sizes["auto"]


def test_numbers_too_large_for_the_cache_become_its_largest():
    values = torch.tensor([1.0, 447.0, 449.0, 1e30, -5000.0, float("inf"), 0.001953125])

    kept = as_cached(values.bfloat16(), FP8)

    assert kept.dtype == FP8
    assert kept.float().tolist() == [1.0, 448.0, 448.0, 448.0, -448.0, 448.0, 0.001953125]
    assert as_cached(torch.tensor([float("nan")]), FP8).float().isnan().all()


def test_backends_that_read_no_fp8_are_refused(folders, monkeypatch):
    class Other(ReferenceAttention):
        name = "other"
        takes_fp8_cache = False

    monkeypatch.setitem(choice.BACKENDS, "other", lambda *_, **__: Other())
    load_executor(folders["llama"], attention="other")

    with pytest.raises(ModelError, match="attention=other can't serve this: it reads no KV cache"):
        load_executor(folders["llama"], attention="other", kv_cache_dtype="fp8")
    assert load_executor(folders["llama"], kv_cache_dtype="fp8").spec.attention == "reference"
