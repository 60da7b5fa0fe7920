"""A device that there isn't: its tensors compute on the CPU, and what needs the host is noted.

Torch takes them for tensors of another device ("meta", which needs no driver), so that code takes
the way it takes there: what stays on the device, what is copied and what is read shows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from workers.model_part import ModelPart
from workers.models.capture import HostReads
from workers.parallel import TensorParallel, Topology

CPU = torch.device("cpu")
DEVICE = torch.device("meta")


class OnDevice(torch.Tensor):
    """A tensor of the device; `inner` is where it is indeed."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnDevice":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Outside of FakeDevice nothing is noted."""
        return compute(func, args, dict(kwargs or {}))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    def tolist(self) -> list:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a tensor of the device to numpy: use Tensor.cpu() first")


class FakeDevice(HostReads):
    """Within it there is the device."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return compute(func, args, kwargs)


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the CPU; what comes out is where it would be."""
    leaves = tree_leaves((args, kwargs))
    own = [each for each in leaves if isinstance(each, OnDevice)]
    strays = [each for each in leaves if isinstance(each, torch.Tensor) and each.is_meta]
    assert len(strays) == len(own), f"{func}: torch.tensor made a tensor on the device"
    target = kwargs.get("device")
    if target is not None:
        kwargs["device"] = CPU
    is_there = bool(own) if target is None else torch.device(target) == DEVICE
    out = _on_cpu(func)(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if func is torch.ops.aten.copy_.default:
        return args[0]
    kept = {id(each.inner): each for each in own}
    return tree_map(lambda each: _wrap(each, kept), out) if is_there else out


class OneOfMany(TensorParallel):
    """Rank 0 without the others: what they would bring is what it has itself."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim=-1)


def load_on_device(folder: Path, tp: int = 1) -> ModelPart:
    """Rank 0's part of a model, as it is where the CPU's kernels don't compute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.layers.linear_methods.linear_kernel", lambda _: None)
        patch.setattr("workers.models.lean_layers.decoder_kernels", lambda _: None)
        part = ModelPart(
            folder,
            dtype="auto",
            device=CPU,
            parallel=OneOfMany(Topology(tp=tp), 0, None),
            on_progress=lambda loaded, total: None,
        )
    _to_device(part.module)
    part._device = DEVICE
    return part


@torch.inference_mode()
def _to_device(module: nn.Module) -> None:
    """Moves parameters and buffers; other tensors stay, as they do when a model is loaded."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(OnDevice(parameter.data), requires_grad=False)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = OnDevice(buffer)


def _inner(each: Any) -> Any:
    return each.inner if isinstance(each, OnDevice) else each


def _wrap(each: Any, kept: Mapping[int, OnDevice]) -> Any:
    if not isinstance(each, torch.Tensor):
        return each
    known = kept.get(id(each))
    return OnDevice(each) if known is None else known


def _on_cpu(func: Any) -> Any:
    """The operator, where the CPU's has the device's formats."""
    if func is torch.ops.aten.histc.default:
        return lambda values, *rest, **named: func(values.float(), *rest, **named).to(values.dtype)
    return func
