"""Where two batches that should be equal aren't."""

from dataclasses import fields, is_dataclass
from typing import Any

import torch


def find_difference(one: Any, other: Any, name: str = "") -> str | None:
    """The first field in which two batches differ, with the place and both values."""
    if is_dataclass(one):
        parts = [
            (each.name, getattr(one, each.name), getattr(other, each.name)) for each in fields(one)
        ]
        name = f"{name}." if name else ""
    elif isinstance(one, tuple) and len(one) == len(other):
        parts = [(f"[{place}]", *pair) for place, pair in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, torch.Tensor):
        return _tensor_difference(one, other, name)
    else:
        return None if one == other else f"{name} is {one} and {other}"
    found = (find_difference(mine, theirs, name + label) for label, mine, theirs in parts)
    return next((each for each in found if each is not None), None)


def _tensor_difference(one: torch.Tensor, other: torch.Tensor, name: str) -> str | None:
    if one.dtype != other.dtype or one.shape != other.shape:
        kinds = [f"{each.dtype} of shape {tuple(each.shape)}" for each in (one, other)]
        return f"{name} is {kinds[0]} and {kinds[1]}"
    if torch.equal(one, other):
        return None
    place = tuple((one != other).nonzero()[0].tolist())
    return f"{name}{list(place)} is {one[place].item()} and {other[place].item()}"
