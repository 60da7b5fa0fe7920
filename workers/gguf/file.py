"""Reads a GGUF file: its metadata and its tensors. Knows no model.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
The `gguf` package knows the quantised formats; its own reader builds an object per array element,
which takes 8 s on a vocabulary of 262,144.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quant_shape_to_byte_shape
from numpy.typing import NDArray

from workers.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

# Kinds of tokens in `tokenizer.ggml.token_type`.
CONTROL, USER_DEFINED = 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor as it lies in the file."""

    name: str
    shape: tuple[int, ...]  # row-major: the last dimension is contiguous
    kind: GGMLQuantizationType
    data: NDArray[np.uint8]  # [*shape[:-1], bytes of a row], a view of the file

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    def values(self) -> NDArray[np.float32]:
        """The tensor in float32, shape as told, not a view of the file.

        Raises ModelError: the `gguf` package doesn't know the tensor's format.
        """
        try:
            values = np.require(dequantize(self.data, self.kind), np.float32, ["W"])
        except NotImplementedError as error:
            raise ModelError(
                f"tensor {self.name} can't be read: the package gguf doesn't dequantise "
                f"{self.kind.name}"
            ) from error
        return values.reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """Arrays of numbers in the metadata are numpy arrays, arrays of strings lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def __getitem__(self, key: str) -> Any:
        """The value of one metadata key. Raises ModelError: the file has none."""
        if key not in self.metadata:
            raise ModelError(f"{self.path}: the GGUF metadata has no {key!r}")
        return self.metadata[key]

    def token(self, key: str) -> str:
        """The piece of the vocabulary that one metadata key names by its id.

        Raises ModelError: the file has no such key, or the vocabulary no such id.
        """
        token, pieces = self[key], self["tokenizer.ggml.tokens"]
        if not 0 <= token < len(pieces):
            raise ModelError(f"{self.path}: {key}={token} must be in [0, {len(pieces)})")
        piece: str = pieces[token]
        return piece


def open_gguf(path: Path) -> GgufFile:
    """Reads the header; tensor data stays on disk until it is asked for.

    Raises ModelError: the file is missing, cut short or not a GGUF file.
    """
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: mmap refuses an empty file
        raise ModelError(f"{path}: can't be read: {error}") from error
    if data[:4] != MAGIC:
        raise ModelError(f"{path}: not a GGUF file: it starts with {bytes(data[:4])!r}")
    try:
        return _parse(path, data)
    except (struct.error, ArithmeticError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: damaged or cut short: {error}") from error


def _parse(path: Path, data: memoryview) -> GgufFile:
    cursor = _Cursor(data, len(MAGIC))
    version = cursor.scalar("<u4")
    if version not in VERSIONS:
        raise ModelError(f"{path}: GGUF version {version} must be one of {VERSIONS}")
    num_tensors, num_keys = cursor.scalar("<u8"), cursor.scalar("<u8")
    metadata = {cursor.string(): cursor.value() for _ in range(num_keys)}
    entries = [_read_entry(cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.offset // alignment) * alignment
    tensors = {
        name: _tensor(name, shape, kind, data, start + offset)
        for name, shape, kind, offset in entries
    }
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _read_entry(cursor: "_Cursor") -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string()
    num_dims = cursor.scalar("<u4")
    # The file names the contiguous dimension first.
    shape = tuple(int(size) for size in cursor.numbers("<u8", num_dims)[::-1])
    kind = GGMLQuantizationType(cursor.scalar("<u4"))
    return name, shape, kind, cursor.scalar("<u8")


def _tensor(
    name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, data: memoryview, offset: int
) -> GgufTensor:
    byte_shape = quant_shape_to_byte_shape(shape, kind)
    raw = np.frombuffer(data, np.uint8, int(np.prod(byte_shape)), offset)
    return GgufTensor(name=name, shape=shape, kind=kind, data=raw.reshape(byte_shape))


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: memoryview, offset: int) -> None:
        self._data = data
        self.offset = offset

    def numbers(self, dtype: str, count: int) -> NDArray[Any]:
        array = np.frombuffer(self._data, dtype, count, self.offset)
        self.offset += array.nbytes
        return array

    def scalar(self, dtype: str) -> Any:
        return self.numbers(dtype, 1)[0].item()

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._data, self.offset)
        start = self.offset + 8
        if start + length > len(self._data):
            raise ValueError(f"a string of {length} bytes at offset {start} passes the file's end")
        self.offset = start + length
        return str(self._data[start : self.offset], "utf-8")

    def value(self) -> Any:
        kind = self.scalar("<u4")
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        kind, count = self.scalar("<u4"), self.scalar("<u8")
        if kind == STRING:
            return [self.string() for _ in range(count)]
        return self.numbers(SCALARS[kind], count)
