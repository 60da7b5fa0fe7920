"""Numbers as they travel: arrays of little-endian bytes, without padding."""

import sys
from array import array
from collections.abc import Iterable
from typing import Any

INT32 = "i"
UINT64 = "Q"
FLOAT32 = "f"


def pack(typecode: str, values: Iterable[float]) -> bytes:
    packed = array(typecode, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(typecode: str, name: str, data: bytes) -> list[Any]:
    """The numbers, ints or floats.

    Raises ValueError: `data` of the field `name` has a part of a number.
    """
    packed: array[Any] = array(typecode)
    if len(data) % packed.itemsize:
        raise ValueError(f"{name} has {len(data)} bytes: must be a multiple of {packed.itemsize}")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
