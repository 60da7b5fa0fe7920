"""Kernels of ours that share threads; several one after another in one call from Python."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from workers.native.build import load


class _Call(ctypes.Structure):
    """As in threads.c."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel, and what it is told but for the number of rows. Memory is the caller's care."""

    kernel: int  # address
    arguments: ctypes.Structure


def load_kernels(name: str, definitions: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of `name`.c, whose work is shared by the threads of threads.c.

    Raises NoCompilerError.
    """
    load_threads()
    return load(name, definitions)


@cache
def load_threads() -> ctypes.CDLL:
    """Raises NoCompilerError."""
    library = load("threads", is_for_others=True)
    library.run_calls.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    library.run_calls.restype = None
    return library


def address_of(function: object) -> int:
    """That of a library's function, which is given (arguments, num_rows)."""
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


class Calls:
    """What it runs may be told otherwise by way of their arguments, between two calls."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._held = [each.arguments for each in calls]
        made = [_Call(each.kernel, ctypes.addressof(each.arguments)) for each in calls]
        self._calls = (_Call * len(calls))(*made)
        self._count = len(calls)
        self._run = load_threads().run_calls

    def __call__(self, num_rows: int) -> None:
        """Of what each of them gets."""
        self._run(self._calls, self._count, num_rows)
