"""What an attention kernel takes, and the reasons to refuse all else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workers.attention.base import AttentionShape, UnsuitedError

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLimits:
    """Of one kernel that reads keys through block tables.

    None masks chunks: FA3's count from where a table begins, which may be within a chunk.
    """

    kernel: str  # its name in messages
    capabilities: tuple[int, ...]  # major numbers of compute capabilities
    takes_dims: Callable[[int, int], bool]  # of queries and keys, of values
    dims: str  # the same in words
    takes_softcap: bool
    takes_sinks: bool
    # Why a sequence's results depend on its batch however the kernel is called; "" if they don't.
    varies: str = ""
    windows_vary: str = ""  # the same, for calls with a window alone

    def check(
        self,
        shapes: Sequence[AttentionShape],
        device: torch.device,
        *,
        deterministic: bool,
    ) -> None:
        """Raises UnsuitedError: not for these calls on this device."""
        capability = torch.cuda.get_device_capability(device)
        if capability[0] not in self.capabilities:
            taken = ", ".join(f"{major}.x" for major in self.capabilities)
            raise UnsuitedError(
                f"{self.kernel} takes compute capability {taken}, not {capability[0]}."
                f"{capability[1]}"
            )
        if deterministic and self.varies:
            raise UnsuitedError(f"{self.kernel} isn't deterministic: {self.varies}")
        for shape in shapes:
            self._check_shape(shape)
            if deterministic and shape.window and self.windows_vary:
                raise UnsuitedError(
                    f"{self.kernel} isn't deterministic with window={shape.window}: "
                    f"{self.windows_vary}"
                )

    def _check_shape(self, shape: AttentionShape) -> None:
        if not self.takes_dims(shape.k_dim, shape.v_dim):
            raise UnsuitedError(
                f"{self.kernel} takes {self.dims}, not {shape.k_dim} of keys and {shape.v_dim} "
                "of values"
            )
        if shape.chunk:
            raise UnsuitedError(f"{self.kernel} doesn't mask chunk={shape.chunk}")
        if shape.softcap and not self.takes_softcap:
            raise UnsuitedError(f"{self.kernel} has no softcap={shape.softcap}")
        if shape.has_sinks and not self.takes_sinks:
            raise UnsuitedError(f"{self.kernel} has no sinks")


def check_device(dtype: torch.dtype, device: torch.device) -> None:
    """Raises UnsuitedError: no kernel of flash attention is for this device or number format."""
    if device.type != "cuda":
        raise UnsuitedError(f"needs a CUDA device, not {device.type}")
    if torch.version.hip is not None:
        raise UnsuitedError("torch is built for ROCm, where it was never tried")
    if dtype not in DTYPES:
        given = str(dtype).removeprefix("torch.")
        raise UnsuitedError(f"takes {' and '.join(DTYPES.values())}, not {given}")


def same_dims(k_dim: int, v_dim: int) -> bool:
    """What flash attention 2 takes without copying the whole cache to pad it."""
    return k_dim == v_dim <= 256 and k_dim % 8 == 0


SAME_DIMS = "equal head dims of at most 256, multiples of 8"
