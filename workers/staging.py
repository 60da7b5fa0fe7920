"""Brings numbers to the device and back, in few copies and without needless waits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

# Numbers between the beginnings of two tensors are a multiple of this: kernels load four at once.
ALIGNMENT = 4
FIRST_NUMBERS = 1 << 14
# While one is being copied from, the next step's is filled.
NUM_BUFFERS = 2


class Event(Protocol):
    """A place in what a device does, that the host can wait for."""

    def synchronize(self) -> None: ...


class HostMemory(Protocol):
    """Memory of the host from which a device copies while the host goes on."""

    def allocate(self, count: int) -> torch.Tensor:
        """[count] int32."""
        ...

    def mark(self, device: torch.device) -> Event:
        """What comes after all that was asked of the device."""
        ...


class PinnedMemory:
    """CUDA's."""

    def allocate(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def mark(self, device: torch.device) -> Event:
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))  # type: ignore[attr-defined]
        return event


@dataclass(slots=True)
class _Buffer:
    numbers: torch.Tensor  # [N] int32
    copied: Event | None = None  # set once the device has what was put here last


class Staging:
    """Of one rank. On the CPU tensors stay where they are.

    What is specific to CUDA (pinned memory, the copy that doesn't wait, its events) hasn't run
    anywhere yet: there was no such device to try it on.
    """

    def __init__(self, device: torch.device, memory: HostMemory | None = None) -> None:
        """Of pinned memory where `memory` is None."""
        self._device = device
        self._memory = memory or PinnedMemory()
        self._buffers: list[_Buffer] = []  # the next one first

    @property
    def is_device(self) -> bool:
        """Whether tensors go anywhere."""
        return self._device.type != "cpu"

    def move(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same int32 tensors on the device, views of one. Changes no tensor that is here."""
        if self._device.type == "cpu":
            return list(tensors)
        buffer = self._take(count_numbers(tensors))
        staged = pack(tensors, buffer.numbers)
        moved = staged.to(self._device, non_blocking=True)
        buffer.copied = self._memory.mark(self._device)
        return unpack(moved, tensors)

    def _take(self, count: int) -> _Buffer:
        """A buffer that nothing is copied from any more."""
        if len(self._buffers) < NUM_BUFFERS:
            self._buffers.insert(0, _Buffer(self._memory.allocate(FIRST_NUMBERS)))
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        if len(buffer.numbers) < count:
            buffer.numbers = self._memory.allocate(max(count, 2 * len(buffer.numbers)))
        return buffer


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, without a wait for it.

    What isn't pinned is copied aside before the call returns.
    """
    return tensor.to(device, non_blocking=True)


def upload_together(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> Sequence[torch.Tensor]:
    """Tensors [n], all of 4 or all of 8 bytes a number, on the device: one copy.

    On the CPU they are the same.
    """
    if device.type == "cpu":
        return tensors
    as_one = torch.int32 if tensors[0].dtype.itemsize == 4 else torch.int64
    moved = upload(torch.stack([tensor.view(as_one) for tensor in tensors]), device)
    return [row.view(each.dtype) for row, each in zip(moved, tensors, strict=True)]


class Arriving:
    """Integers of a device on their way to the host, in one copy."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors [n] of one device; those of the CPU are there."""
        self._tensors = tensors
        self._copy: torch.Tensor | None = None  # [tensors, n] int64
        self._copied: torch.cuda.Event | None = None
        device = tensors[0].device
        if device.type == "cpu":
            return
        packed = torch.stack([tensor.long() for tensor in tensors])
        if device.type != "cuda":
            self._copy = packed.cpu()
            return
        self._copy = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        self._copy.copy_(packed, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(device))

    def wait(self) -> Sequence[torch.Tensor]:
        """The tensors on the CPU. Blocks until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._copy is None:
            return self._tensors
        return [row.to(each.dtype) for row, each in zip(self._copy, self._tensors, strict=True)]


def count_numbers(tensors: Sequence[torch.Tensor]) -> int:
    """Room that `pack` needs."""
    return sum(_aligned(tensor.numel()) for tensor in tensors)


def pack(tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> torch.Tensor:
    """Writes int32 tensors one after the other into `buffer`; returns the part that they fill."""
    start = 0
    for tensor in tensors:
        assert tensor.dtype == torch.int32, "one buffer has one number format"
        buffer[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
        start += _aligned(tensor.numel())
    return buffer[:start]


def unpack(packed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What was packed, as views with the shapes of `tensors`."""
    views = []
    start = 0
    for tensor in tensors:
        views.append(packed[start : start + tensor.numel()].view(tensor.shape))
        start += _aligned(tensor.numel())
    return views


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
