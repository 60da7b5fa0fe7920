"""What the memory of a CUDA device goes to, measured by running a step as large as any."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.errors import ModelError

GIB = 1 << 30


class DeviceMemory(Protocol):
    """Bytes of one device, and of them those of this process's tensors."""

    def total(self) -> int: ...

    def free(self) -> int:
        """Taken by no process; what torch keeps for later counts as taken."""
        ...

    def reserved(self) -> int:
        """Taken by torch in this process."""
        ...

    def release(self) -> None:
        """Gives back what torch keeps for later, and forgets the peak."""
        ...

    def peak_reserved(self) -> int:
        """Most that was reserved since `release`."""
        ...


class CudaMemory:
    """As DeviceMemory. Not yet run on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_reserved(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of a device."""

    total: int
    fraction: float  # of the total, that everything together may take
    parameters: int  # and buffers
    step: int  # beyond them, while the largest step runs
    graphs: int
    other: int  # contexts of CUDA and NCCL, other processes

    @property
    def left(self) -> int:
        """For the KV cache; less than 0 where the rest is too much already."""
        taken = self.parameters + self.step + self.graphs + self.other
        return int(self.fraction * self.total) - taken

    def __str__(self) -> str:
        return (
            f"of {_gib(self.total)}, gpu_memory_fraction={self.fraction:g} allows "
            f"{_gib(self.fraction * self.total)}; weights take {_gib(self.parameters)}, "
            f"the largest step {_gib(self.step)}, CUDA graphs {_gib(self.graphs)}, "
            f"other things {_gib(self.other)}"
        )

    def check(self) -> None:
        """Raises ModelError: nothing is left."""
        if self.left <= 0:
            raise ModelError(f"no GPU memory is left for the KV cache: {self}; {self._advice()}")

    def _advice(self) -> str:
        parts = {
            "set --tp to more": self.parameters,
            "set --max-num-batched-tokens or --max-num-seqs to less": self.step,
            "set --enforce-eager": self.graphs,
            "end what else is on the device": self.other,
        }
        return f"{max(parts, key=lambda advice: parts[advice])}, or --gpu-memory-fraction to more"


def measure(
    memory: DeviceMemory,
    *,
    fraction: float,
    run_largest_step: Callable[[], None],
    capture: Callable[[], int],
) -> MemoryUse:
    """Once the model is loaded, and nothing else is.

    `capture` returns the bytes that all graphs will take.
    """
    memory.release()
    parameters = memory.reserved()
    run_largest_step()
    step = memory.peak_reserved() - parameters
    graphs = capture()
    memory.release()
    total = memory.total()
    # The first step has made what libraries keep for good, on the device and in torch.
    kept = memory.reserved() - parameters
    return MemoryUse(
        total=total,
        fraction=fraction,
        parameters=parameters,
        step=max(step, kept),
        graphs=graphs,
        other=total - memory.free() - memory.reserved(),
    )


@contextmanager
def explaining(what: str, advice: str) -> Iterator[None]:
    """Raises ModelError: a device's memory doesn't suffice for the block, or it fails there."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).partition(". ")[0]
        raise ModelError(f"GPU memory doesn't suffice for {what}: {first}; {advice}") from error
    except torch.AcceleratorError as error:
        raise ModelError(f"the GPU fails at {what}: {error}; {advice}") from error


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
