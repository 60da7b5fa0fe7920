"""A decode step of every family leaves the host alone, and what doesn't is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tests.families import FAMILIES, SIZES
from tests.host_reads import CPU, DEVICE, FakeDevice, load_on_device
from tests.tiny_models import (
    BOUND,
    Feeder,
    error_in_std,
    expect,
    forced_logits,
    load_executor,
    save_random,
    save_tiny_model,
)
from workers.model_part import ModelPart
from workers.models.capture import why_not_capturable

pytestmark = pytest.mark.cpu

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
Operation = Callable[[torch.Tensor], object]
NEEDY: dict[str, Operation] = {
    "item": lambda each: each[0, 0].item(),
    "tolist": lambda each: each.tolist(),
    "bool": lambda each: bool(each.sum() > 0),
    "to the host": lambda each: each.cpu(),
    "copied to the host": lambda each: torch.empty(each.shape).copy_(each),
    "from the host": lambda each: torch.ones(3).to(each.device),
    "copied from the host": lambda each: each.copy_(torch.empty(each.shape)),
    "nonzero": lambda each: each.nonzero(),
    "where": lambda each: torch.where(each > 3),
    "by a mask": lambda each: each[each > 3],
    "set by a mask": lambda each: each.__setitem__(each > 3, 1.0),
    "masked_select": lambda each: each.masked_select(each > 3),
    "unique": lambda each: each.unique(),
    "bincount": lambda each: each.flatten().long().bincount(minlength=20),
    "repeats": lambda each: torch.repeat_interleave(each[0].long()),
    "repeated": lambda each: each.repeat_interleave(each[:, 0].long(), dim=0),
    "one_hot without a count": lambda each: torch.nn.functional.one_hot(each.long()),
    "slice": lambda each: each[: each[0, 0].long()],
    "equal": lambda each: torch.equal(each, each),
    "index of the host": lambda each: each[torch.tensor([0, 1])],
    "mixed": lambda each: each + torch.ones(4),
}
HARMLESS: dict[str, Operation] = {
    "sum": lambda each: (each + 1).sum(),
    "a number": lambda each: each * torch.tensor(2.0),
    "by an index": lambda each: each[torch.arange(2, device=each.device)],
    "masked_fill": lambda each: each.masked_fill(each > 3, 0.0),
    "choice": lambda each: torch.where(each > 3, each, 0.0),
    "repeats of a size": lambda each: torch.repeat_interleave(each[0].long(), output_size=6),
    "repeats of one number": lambda each: each.repeat_interleave(2, dim=0),
    "one_hot": lambda each: torch.nn.functional.one_hot(each.long(), 20),
    "topk": lambda each: each.topk(2).indices,
    "like": lambda each: torch.zeros_like(each, device="cpu"),
    "of the host alone": lambda each: torch.arange(3).nonzero().tolist(),
}


def found_in(operation: Operation) -> list[str]:
    with torch.inference_mode(), FakeDevice() as device:
        numbers = torch.arange(12.0, device=DEVICE).view(3, 4)
        assert not device.found
        operation(numbers)
        return device.found


@pytest.mark.parametrize("name", NEEDY)
def test_what_needs_the_host_is_found(name):
    (told,) = found_in(NEEDY[name])

    assert "test_capture.py:" in told


@pytest.mark.parametrize("name", HARMLESS)
def test_what_stays_on_the_device_is_not(name):
    assert found_in(HARMLESS[name]) == []


def test_the_device_computes_what_the_cpu_does():
    with torch.inference_mode(), FakeDevice():
        numbers = torch.arange(12.0).view(3, 4).to(DEVICE)
        numbers[0] += 100.0
        numbers[:, 1].fill_(7.0)
        back = numbers.cpu()

    assert numbers.device == DEVICE
    assert back.device == CPU
    assert back[:2].tolist() == [[100.0, 7.0, 102.0, 103.0], [4.0, 7.0, 6.0, 7.0]]


def reason(part: ModelPart) -> str | None:
    with FakeDevice():
        return why_not_capturable(part)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_of_every_family_can_be_captured(tmp_path, family, tp):
    part = load_on_device(save_tiny_model(tmp_path, family), tp)

    assert reason(part) is None


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_that_are_found_by_their_hits_cannot(tmp_path, family):
    part = load_on_device(save_tiny_model(tmp_path, family))
    part.module.set_experts_implementation("eager")

    told = reason(part)

    assert told is not None
    assert "nonzero" in told
    assert "modeling_" in told


def test_errors_that_are_others_stay_errors(tmp_path):
    part = load_on_device(save_tiny_model(tmp_path, "llama"))
    part.module.lm_head.weight = torch.nn.Parameter(torch.zeros(3, 5), requires_grad=False)

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        reason(part)


def dynamic_model(folder: Path) -> Path:
    return save_random(folder, LlamaConfig(**SIZES, rope_parameters=DYNAMIC))


def test_rotary_frequencies_are_not_chosen_by_the_batch(tmp_path):
    part = load_on_device(dynamic_model(tmp_path))
    assert reason(part) is None

    del part.module.model.rotary_emb.__dict__["forward"]
    told = reason(part)

    assert told is not None
    assert "is_nonzero" in told
    assert "modeling_rope_utils.py" in told


def test_nor_are_those_of_longrope(tmp_path):
    """Its second set, which the module would make in the first step, comes from the host."""
    part = load_on_device(save_tiny_model(tmp_path, "phi3-longrope"))
    assert reason(part) is None

    del part.module.model.rotary_emb.__dict__["forward"]
    with pytest.raises(AssertionError, match="made a tensor on the device"):
        reason(part)


def test_dynamic_rotary_embeddings_equal_transformers(tmp_path):
    folder = dynamic_model(tmp_path)
    expected = expect(folder)

    logits = forced_logits(Feeder(load_executor(folder)), expected.texts)

    assert error_in_std(logits, expected.logits) < BOUND
