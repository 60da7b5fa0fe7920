"""Dataclasses of arrays, such as StepPlan, by the names of their arrays."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from protos import recording_pb2

DIGEST_BYTES = 8

Array = NDArray[Any]
T = TypeVar("T")


def arrays_of(
    value: Any, prefix: str = "", *, leave_out: Collection[str] = ()
) -> Iterator[tuple[str, Array]]:
    """Every array in a dataclass with its name: `block_tables.0.block_ids`.

    Fields to be left out aren't looked at.
    """
    for field in fields(value):
        if not field.compare or field.name in leave_out:
            continue
        name, part = prefix + field.name, getattr(value, field.name)
        if isinstance(part, np.ndarray):
            yield name, part
        elif is_dataclass(part):
            yield from arrays_of(part, f"{name}.")
        elif isinstance(part, Sequence) and not isinstance(part, str):
            for index, each in enumerate(part):
                yield from arrays_of(each, f"{name}.{index}.")


def digest_of(arrays: Iterable[tuple[str, Array]]) -> bytes:
    """Of names, types, lengths and contents."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, array in arrays:
        digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
        digest.update(_little(array).tobytes())
    return digest.digest()


def encode_arrays(value: Any) -> list[recording_pb2.Array]:
    return [
        recording_pb2.Array(
            name=name,
            dtype=_little(array).dtype.str,
            shape=array.shape,
            data=_little(array).tobytes(),
        )
        for name, array in arrays_of(value)
    ]


def decode_arrays(messages: Iterable[recording_pb2.Array]) -> dict[str, Array]:
    """Raises ValueError: an array isn't as long as its shape says."""
    return {
        each.name: np.frombuffer(each.data, np.dtype(each.dtype)).reshape(tuple(each.shape))
        for each in messages
    }


def build(
    kind: Callable[..., T], arrays: Mapping[str, Array], prefix: str = "", **others: Any
) -> T:
    """The dataclass `kind` of its arrays; `others` are fields that are none.

    Raises TypeError: an array is missing.
    """
    values = dict(others)
    for name, hint in get_type_hints(kind).items():
        full = prefix + name
        if full in arrays:
            values[name] = arrays[full]
        elif is_dataclass(hint):
            values[name] = build(cast("Callable[..., Any]", hint), arrays, f"{full}.")
        elif get_origin(hint) is Sequence:
            (part,) = get_args(hint)
            count = len({each.split(".")[-2] for each in arrays if each.startswith(f"{full}.")})
            values[name] = tuple(build(part, arrays, f"{full}.{i}.") for i in range(count))
    return kind(**values)


def _little(array: Array) -> Array:
    return array.astype(array.dtype.newbyteorder("<"), copy=False)
