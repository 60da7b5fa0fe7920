"""Norms, rotary embedding and gates of decoder layers, by kernels of ours in C, on a CPU."""

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch

from workers.native.build import NoCompilerError
from workers.native.calls import Call, address_of, load_kernels
from workers.native.linear import DEFINITIONS

logger = logging.getLogger(__name__)

LANES = 16  # widths are multiples of it, whatever the processor's vectors
Gate = Literal["silu", "gelu"]


class _NormArguments(ctypes.Structure):
    """As in decoder.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("output", "rows", "added", "weight")),
        ("width", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("plus_one", "num_threads")),
    )


class _HeadGroup(ctypes.Structure):
    """As in decoder.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("heads", "weight")),
        ("num_heads", ctypes.c_int64),
    )


class _RotaryArguments(ctypes.Structure):
    """As in decoder.c."""

    _fields_ = (
        ("groups", _HeadGroup * 2),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine")),
        *((name, ctypes.c_int64) for name in ("dim", "rotary")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("plus_one", "num_threads")),
    )


class _GateArguments(ctypes.Structure):
    """As in decoder.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("output", "gate", "up")),
        ("width", ctypes.c_int64),
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
    """Calls for rows of one dtype that lie at addresses, dense. A row's bits are its own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        sizes = {"norm": _NormArguments, "rotary": _RotaryArguments, "gate": _GateArguments}
        for name, arguments in sizes.items():
            size = library[f"{name}_bytes"]
            size.restype = ctypes.c_int64
            assert size() == ctypes.sizeof(arguments), "as in decoder.c"
        self._add_and_norm = address_of(library.add_and_norm)
        self._norm_and_rotate = address_of(library.norm_and_rotate)
        self._gates = {
            "silu": address_of(library.silu_gate),
            "gelu": address_of(library.gelu_gate),
        }

    def norm(
        self, output: int, rows: int, norm: Norm | None, *, width: int, added: int | None = None
    ) -> Call:
        """Of [T, width]: rows normed; with `added`, which is normed, or not, added to rows."""
        arguments = _NormArguments(
            output=output, rows=rows, added=added, width=width, num_threads=torch.get_num_threads()
        )
        if norm is not None:
            arguments.weight = norm.address
            arguments.epsilon, arguments.plus_one = norm.epsilon, norm.plus_one
        return Call(self._add_and_norm, arguments)

    def norm_and_rotate(
        self, heads: Sequence[tuple[int, int]], norms: Sequence[Norm | None], *, dim: int
    ) -> Call:
        """Queries and keys [T, heads * dim] in place: where each lie, and their number.

        Arguments lack cosine and sine [T, rotary], and how many `rotary` are.
        """
        arguments = _RotaryArguments(dim=dim, num_threads=torch.get_num_threads())
        for place, ((address, count), norm) in enumerate(zip(heads, norms, strict=True)):
            weight = None if norm is None else norm.address
            arguments.groups[place] = _HeadGroup(address, weight, count)
            if norm is not None:
                arguments.epsilon, arguments.plus_one = norm.epsilon, norm.plus_one
        return Call(self._norm_and_rotate, arguments)

    def gate(self, kind: Gate, output: int, gate: int, up: int, *, width: int) -> Call:
        """[T, width] each -> kind(gate) * up."""
        arguments = _GateArguments(
            output=output, gate=gate, up=up, width=width, num_threads=torch.get_num_threads()
        )
        return Call(self._gates[kind], arguments)


@cache
def decoder_kernels(dtype: torch.dtype) -> DecoderKernels | None:
    """None where there are none for these numbers, this processor or without a compiler."""
    if dtype not in DEFINITIONS:
        return None
    try:
        library = load_kernels("decoder", DEFINITIONS[dtype])
    except NoCompilerError as error:
        logger.warning("decoder layers are computed by torch: %s", error)
        return None
    return DecoderKernels(library) if library.has_vectors() else None
