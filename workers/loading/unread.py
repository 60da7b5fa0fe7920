"""Tensors made of parts of stored ones, put together on paper: nothing is read.

torch.stack, cat, split, chunk and transpose take them as they take tensors, so that code which only
moves elements can be run on them, and each rank then reads just its part of the outcome.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from workers.loading.checkpoint import BITS, StoredTensor
from workers.parallel import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One dimension of a piece."""

    start: int  # of the piece in the tensor it is part of
    length: int
    stored_dim: int | None  # the dimension in the file; None where the piece was stacked, length 1
    stored_start: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a stored tensor; every stored dimension is that of one axis."""

    stored: StoredTensor
    axes: tuple[Axis, ...]

    def put(self, dim: int, axis: Axis) -> "Piece":
        """The same with another axis at `dim`."""
        return Piece(self.stored, (*self.axes[:dim], axis, *self.axes[dim + 1 :]))

    def shift(self, dim: int, by: int) -> "Piece":
        axis = self.axes[dim]
        return self.put(dim, replace(axis, start=axis.start + by))

    def narrow(self, dim: int, start: int, stop: int) -> "Piece | None":
        """What lies in [start, stop) of `dim`, counted from `start`; None: nothing does."""
        axis = self.axes[dim]
        low, high = max(start, axis.start), min(stop, axis.start + axis.length)
        if low >= high:
            return None
        skipped = low - axis.start
        narrowed = replace(
            axis,
            start=low - start,
            length=high - low,
            stored_start=axis.stored_start + skipped,
        )
        return self.put(dim, narrowed)

    @property
    def num_bytes(self) -> int:
        """What is read of the file."""
        return math.prod(axis.length for axis in self.axes) * BITS[self.stored.format] // 8


@dataclass(frozen=True, slots=True)
class UnreadTensor:
    """Pieces that fill `shape` without overlap."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, stored: StoredTensor) -> "UnreadTensor":
        axes = tuple(
            Axis(start=0, length=size, stored_dim=dim) for dim, size in enumerate(stored.shape)
        )
        return cls(stored.shape, (Piece(stored, axes),))

    def narrow(self, dim: int, start: int, length: int) -> "UnreadTensor":
        """The part [start, start + length) of `dim`."""
        narrowed = (piece.narrow(dim, start, start + length) for piece in self.pieces)
        return UnreadTensor(
            _with_size(self.shape, dim, length),
            tuple(piece for piece in narrowed if piece is not None),
        )

    def contiguous(self) -> "UnreadTensor":
        return self

    @property
    def num_bytes(self) -> int:
        """What is read of the files."""
        return sum(piece.num_bytes for piece in self.pieces)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        move = MOVES.get(function)
        # torch makes a TypeError of it: only a real tensor will do.
        return NotImplemented if move is None else move(*args, **(kwargs or {}))


def _cat(tensors: Sequence[UnreadTensor], dim: int = 0) -> UnreadTensor:
    first = tensors[0].shape
    dim = range(len(first))[dim]
    pieces: list[Piece] = []
    place = 0
    for tensor in tensors:
        if _with_size(tensor.shape, dim, 0) != _with_size(first, dim, 0):
            raise ValueError(f"shapes {first} and {tensor.shape} differ outside dimension {dim}")
        pieces += [piece.shift(dim, place) for piece in tensor.pieces]
        place += tensor.shape[dim]
    return UnreadTensor(_with_size(first, dim, place), tuple(pieces))


def _stack(tensors: Sequence[UnreadTensor], dim: int = 0) -> UnreadTensor:
    dim = range(len(tensors[0].shape) + 1)[dim]
    axis = Axis(start=0, length=1, stored_dim=None)
    return _cat(
        [
            UnreadTensor(
                (*tensor.shape[:dim], 1, *tensor.shape[dim:]),
                tuple(
                    Piece(piece.stored, (*piece.axes[:dim], axis, *piece.axes[dim:]))
                    for piece in tensor.pieces
                ),
            )
            for tensor in tensors
        ],
        dim,
    )


def _split(tensor: UnreadTensor, sizes: int | Iterable[int], dim: int = 0) -> list[UnreadTensor]:
    dim = range(len(tensor.shape))[dim]
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    parts: list[UnreadTensor] = []
    place = 0
    for size in sizes:
        parts.append(tensor.narrow(dim, place, size))
        place += size
    if place != length:
        raise ValueError(f"parts of {place} in all must fill dimension {dim} of {length}")
    return parts


def _chunk(tensor: UnreadTensor, chunks: int, dim: int = 0) -> list[UnreadTensor]:
    return _split(tensor, -(-tensor.shape[dim] // chunks), dim)


def _transpose(tensor: UnreadTensor, dim0: int, dim1: int) -> UnreadTensor:
    order = list(range(len(tensor.shape)))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return UnreadTensor(
        tuple(tensor.shape[dim] for dim in order),
        tuple(
            Piece(piece.stored, tuple(piece.axes[dim] for dim in order)) for piece in tensor.pieces
        ),
    )


def _with_size(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


MOVES: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.split: _split,
    torch.stack: _stack,
    torch.transpose: _transpose,
}


AnyTensor = TypeVar("AnyTensor", torch.Tensor, UnreadTensor)


def cut(tensor: AnyTensor, shard: Shard | None) -> AnyTensor:
    """A rank's parts of a whole tensor, without padding."""
    if shard is None:
        return tensor
    parts = [tensor.narrow(shard.dim, start, stop - start) for start, stop in shard.ranges]
    cat: Any = torch.cat  # its types lack unread tensors
    joined: AnyTensor = parts[0] if len(parts) == 1 else cat(parts, dim=shard.dim)
    return joined
