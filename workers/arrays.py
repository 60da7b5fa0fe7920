"""Arrays as they come over the wire: little-endian bytes, their lengths and ranges checked.

Every message of an error names the array.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.errors import StepError

Int32 = NDArray[np.int32]

UINT16 = np.dtype("<u2")
INT32 = np.dtype("<i4")
UINT64 = np.dtype("<u8")
FLOAT32 = np.dtype("<f4")


def read_array(
    name: str, data: bytes, dtype: np.dtype[Any], count: int | None = None, like: str = ""
) -> NDArray[Any]:
    """The numbers in `data`.

    Raises StepError: bytes are left over, or there are not `count` numbers, as `like` has.
    """
    if len(data) % dtype.itemsize:
        raise StepError(
            f"{name} has {len(data)} bytes: must be a multiple of {dtype.itemsize}, one number"
        )
    array = np.frombuffer(data, dtype)
    if count is not None and len(array) != count:
        raise StepError(f"{name} has {len(array)} values, {like} has {count}: must be equal")
    return array


def check_range(name: str, array: NDArray[Any], low: int, end: int) -> None:
    """Raises StepError: a number isn't in [low, end)."""
    if len(array) == 0:
        return
    for extreme in (int(array.min()), int(array.max())):
        if not low <= extreme < end:
            raise StepError(f"{name} has {extreme}: must be in [{low}, {end})")


def check_each(name: str, array: Int32, low: Int32 | int, high: Int32 | int) -> None:
    """Raises StepError: a number isn't between its own bounds, both allowed."""
    good = (array >= low) & (array <= high)
    if good.all():
        return
    row = int(np.argmin(good))
    lows, highs = np.broadcast_arrays(low, high, array)[:2]
    raise StepError(f"{name}[{row}] is {array[row]}: must be in [{lows[row]}, {highs[row]}]")


def to_tensor(array: NDArray[Any]) -> torch.Tensor:
    """A copy: the message's bytes are read-only, and torch has no read-only tensors."""
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=True))


def to_int64(array: NDArray[Any]) -> torch.Tensor:
    """Numbers that index tensors."""
    return torch.from_numpy(array.astype(np.int64))
