"""Whether a decode step can be captured in a CUDA graph: it mustn't need the host.

What a capture can't hold: reading a number of the device, shapes that depend on such numbers, and
copies between host and device.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from workers.layers.paged_attention import AttentionCall, AttentionInputs, AttentionPass, Settings

NUM_ROWS = 4
# Operators that read numbers, be it to make a shape of them.
READS = frozenset(
    {
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"),
        *("nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    }
)
INDEXES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
MASKS = (torch.bool, torch.uint8)
TO_DEVICE = "copies to the device"
TO_HOST = "copies to the host"


class Model(Protocol):
    """What is asked of a rank's part of a model; `calls` are its attention calls, in order."""

    module: PreTrainedModel
    calls: tuple[AttentionCall, ...]
    vocab_size: int

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        attention: AttentionPass,
    ) -> torch.Tensor: ...


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators within that need the host, by name and place; runs them all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        need = find_need(func, args, kwargs)
        if need is None and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):
            with self:
                return func.decompose(*args, **kwargs)
        if need is not None:
            self.found.append(f"{func} {need}, in {_caller()}")
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Where a test puts a device of its own."""
        return func(*args, **kwargs)


def find_need(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """What an operator needs the host for, as the end of a sentence; None: nothing."""
    name = func.overloadpacket.__name__
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    on_device = [each.device.type != "cpu" for each in tensors]
    target = kwargs.get("device")
    if target is not None and tensors:
        # A factory of a tensor like another one copies nothing.
        copies = name in ("to", "_to_copy")
        there, here = (torch.device(each).type != "cpu" for each in (target, tensors[0].device))
        return (TO_DEVICE if there else TO_HOST) if copies and there != here else None
    if not any(on_device):
        return None
    if name in READS:
        return "reads the device"
    if func is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        return "reads the device for a shape"
    if name in INDEXES and any(each is not None and each.dtype in MASKS for each in args[1]):
        return "reads the device for a shape"
    if name == "copy_" and not all(on_device):
        return TO_DEVICE if on_device[0] else TO_HOST
    # A single number of the host goes along with the kernel.
    pairs = zip(tensors, on_device, strict=True)
    return TO_DEVICE if any(each.dim() > 0 for each, there in pairs if not there) else None


def _caller() -> str:
    """The innermost place that is neither torch's nor ours: where the model's code asks for it."""
    for frame, line in traceback.walk_stack(None):
        path = frame.f_code.co_filename
        if path != __file__ and "/torch/" not in path and "host_reads" not in path:
            return f"{path.rpartition('/')[2]}:{line}"
    return "torch"


class ShapePass:
    """Answers attention calls with zeros of the right shape."""

    def __init__(self, calls: Sequence[AttentionCall]) -> None:
        self._calls = iter(calls)

    def attend(
        self,
        module: torch.nn.Module,
        inputs: AttentionInputs,
        mask: object,
        settings: Settings,
        others: Mapping[str, object],
    ) -> torch.Tensor:
        """Zeros [T, Hq, V], the heads that this rank keeps."""
        shape = next(self._calls).shape
        return inputs.value.new_zeros(inputs.query.shape[1], shape.num_heads, shape.v_dim)

    def take(self, calls: Sequence[AttentionCall], dtype: torch.dtype) -> None:
        """There is no cache."""


@torch.inference_mode()
def why_not_capturable(model: Model) -> str | None:
    """Why a CUDA graph can't hold the model's decode step, half a sentence; None: it can.

    Runs a forward pass of 4 rows; all ranks call it together. Attention isn't judged.
    """
    device = next(model.module.parameters()).device
    rows = torch.arange(NUM_ROWS, dtype=torch.int32, device=device)
    ids = (rows + 1) % model.vocab_size
    reads = HostReads()
    try:
        with _errors_on_sync(device), reads:
            model.forward(ids, torch.zeros_like(rows), rows, ShapePass(model.calls))
    except RuntimeError as error:
        # Kernels that wait within, where no operator shows.
        if "synchronizing" not in str(error):
            raise
        return reads.found[0] if reads.found else str(error)
    return reads.found[0] if reads.found else None


@contextmanager
def _errors_on_sync(device: torch.device) -> Iterator[None]:
    """In the block torch raises where the host waits for a CUDA device."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
