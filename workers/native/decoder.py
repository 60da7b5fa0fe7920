"""Norms, rotary embedding and gates of decoder layers, by kernels of ours in C, on a CPU."""

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch

from workers.native.build import NoCompilerError, load
from workers.native.linear import DEFINITIONS, empty_aligned

logger = logging.getLogger(__name__)

LANES = 16  # widths are multiples of it, whatever the processor's vectors
Gate = Literal["silu", "gelu"]


class _HeadGroup(ctypes.Structure):
    """As in decoder.c."""

    _fields_ = (
        ("heads", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
    )


class _RotaryArguments(ctypes.Structure):
    """As in decoder.c."""

    _fields_ = (
        ("groups", _HeadGroup * 2),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "room")),
        *((name, ctypes.c_int64) for name in ("num_rows", "dim", "rotary")),
        ("epsilon", ctypes.c_float),
        ("plus_one", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm. With `plus_one` the weight [width] is what is added to one."""

    weight: torch.Tensor
    epsilon: float
    plus_one: bool
    address: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.weight.data_ptr())


class DecoderKernels:
    """For numbers of one dtype. Threads are those of torch. A row's bits are its own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.rotary_bytes.restype = ctypes.c_int64
        assert library.rotary_bytes() == ctypes.sizeof(_RotaryArguments), "as in decoder.c"
        self._gates = {"silu": library.silu_gate, "gelu": library.gelu_gate}
        for gate in self._gates.values():
            gate.argtypes = [*(ctypes.c_void_p,) * 3, ctypes.c_int64, ctypes.c_int32]
            gate.restype = None
        self._add_and_norm = library.add_and_norm
        self._add_and_norm.argtypes = [
            *(ctypes.c_void_p,) * 5,
            *(ctypes.c_int64,) * 2,
            ctypes.c_float,
            *(ctypes.c_int32,) * 2,
        ]
        self._norm_and_rotate = library.norm_and_rotate
        self._add_and_norm.restype = self._norm_and_rotate.restype = None
        self._room = torch.empty(0)
        self._address = 0

    def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Dense [..., width] -> the same shape."""
        output = torch.empty_like(rows)
        self._run(rows, None, norm, output)
        return output

    def add(self, rows: torch.Tensor, added: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Dense [..., width] each -> rows + added, or rows + norm(added)."""
        output = torch.empty_like(rows)
        self._run(rows, added, norm, output)
        return output

    def _run(
        self,
        rows: torch.Tensor,
        added: torch.Tensor | None,
        norm: Norm | None,
        output: torch.Tensor,
    ) -> None:
        width = rows.shape[-1]
        num_threads = torch.get_num_threads()
        self._add_and_norm(
            output.data_ptr(),
            rows.data_ptr(),
            None if added is None else added.data_ptr(),
            None if norm is None else norm.address,
            self._floats(width * num_threads),
            rows.numel() // width,
            width,
            0.0 if norm is None else norm.epsilon,
            norm is not None and norm.plus_one,
            num_threads,
        )

    def norm_and_rotate(
        self,
        heads: Sequence[torch.Tensor],
        norms: Sequence[Norm | None],
        cosine: torch.Tensor,
        sine: torch.Tensor,
        *,
        dim: int,
    ) -> None:
        """Queries and keys [1, T, heads * dim], in place; cosine and sine [1, T, rotary]; dense."""
        num_threads = torch.get_num_threads()
        num_rows, rotary = cosine.shape[1:]
        groups = [
            _HeadGroup(
                each.data_ptr(),
                None if norm is None else norm.address,
                each.shape[-1] // dim,
            )
            for each, norm in zip(heads, norms, strict=True)
        ]
        norm = next((each for each in norms if each is not None), None)
        self._norm_and_rotate(
            ctypes.byref(
                _RotaryArguments(
                    (_HeadGroup * 2)(*groups),
                    *(cosine.data_ptr(), sine.data_ptr(), self._floats(dim * num_threads)),
                    *(num_rows, dim, rotary),
                    0.0 if norm is None else norm.epsilon,
                    norm is not None and norm.plus_one,
                    num_threads,
                )
            )
        )

    def gate(self, kind: Gate, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """kind(gate) * up; dense, of one shape."""
        output = torch.empty_like(up)
        self._gates[kind](
            *(output.data_ptr(), gate.data_ptr(), up.data_ptr()),
            *(up.numel(), torch.get_num_threads()),
        )
        return output

    def _floats(self, count: int) -> int:
        """Address of room that threads compute in."""
        if self._room.numel() < count:
            self._room = empty_aligned((count,), torch.float32)
            self._address = self._room.data_ptr()
        return self._address


def decoder_kernels(dtype: torch.dtype) -> DecoderKernels | None:
    """Of their own for each thread that computes with them: they have room that they compute in.

    None where there are none for these numbers, this processor or without a compiler.
    """
    library = _library(dtype)
    return None if library is None else DecoderKernels(library)


@cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    if dtype not in DEFINITIONS:
        return None
    try:
        library = load("decoder", DEFINITIONS[dtype])
    except NoCompilerError as error:
        logger.warning("decoder layers are computed by torch: %s", error)
        return None
    return library if library.has_vectors() else None
