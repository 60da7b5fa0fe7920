"""Which backend is chosen, and why another isn't."""

from dataclasses import replace

import pytest
import torch

from tests.attention_steps import CPU, Step
from workers.attention import choice
from workers.attention.base import UnsuitedError
from workers.attention.triton import make
from workers.errors import ModelError

pytestmark = pytest.mark.cpu


def test_auto_leaves_the_interpreter_alone():
    shapes = [Step(lengths=[]).shape]

    assert choice.choose("auto", shapes, dtype=torch.float16, device=CPU).name == "reference"
    assert choice.choose("triton", shapes, dtype=torch.float32, device=CPU).name == "triton"


@pytest.mark.parametrize(
    ("changes", "dtype", "said"),
    [
        ({}, torch.float64, "not torch.float64"),
        ({}, torch.bfloat16, "interpreter can't multiply bfloat16"),
        ({"v_dim": 513}, torch.float32, "a head of 513 numbers is more than 512"),
        ({"group": 71, "k_dim": 128}, torch.float32, "71 query heads of 128 numbers"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(changes, dtype, said):
    with pytest.raises(UnsuitedError, match=said):
        make([replace(Step(lengths=[]), **changes).shape], dtype, CPU)


def test_devices_and_modes_that_do_not_go_together_are_refused(monkeypatch):
    shapes = [Step(lengths=[]).shape]
    with pytest.raises(UnsuitedError, match="TRITON_INTERPRET=1"):
        make(shapes, torch.float16, torch.device("cuda"))
    monkeypatch.setattr("workers.attention.triton.JITFunction", object)  # as if compiled
    with pytest.raises(UnsuitedError, match="needs a CUDA device, and this is cpu"):
        make(shapes, torch.float16, CPU)


def test_without_triton_the_choice_says_so(monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="triton isn't installed"):
        choice.choose("triton", [], dtype=torch.float32, device=CPU)
