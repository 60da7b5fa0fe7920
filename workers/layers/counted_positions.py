"""Attention modules that count positions themselves, and what makes them count right."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# They scale queries by position, and take a step for one sequence that follows its cache.
COUNTING = frozenset({"Llama4TextAttention"})


class Offsets:
    """Stands for a cache: what must be added to a token's row to get its position."""

    def __init__(self, positions: torch.Tensor) -> None:
        """`positions` [1, T]."""
        rows = torch.arange(positions.shape[1], device=positions.device)
        self._offsets = positions[0] - rows

    def get_seq_length(self, *_: object, **__: object) -> torch.Tensor:
        """[T], where a cache would give the number that all rows share."""
        return self._offsets

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values go to the paged cache, later."""
        return key, value


class CountedForward:
    """Stands for the forward of such a module."""

    def __init__(self, forward: Callable[..., Any], positions: Callable[[], torch.Tensor]) -> None:
        """`positions` gives those of the forward pass that runs, [1, T]."""
        self._positions = positions
        names = inspect.signature(forward).parameters
        self._forward = forward
        self._cache = next(name for name in ("cache", "past_key_values") if name in names)
        self._takes_positions = "cache_position" in names

    def __call__(self, *arguments: object, **keywords: object) -> Any:
        positions = self._positions()
        keywords[self._cache] = Offsets(positions)
        if self._takes_positions:
            keywords["cache_position"] = positions[0]
        return self._forward(*arguments, **keywords)


def count_by_position_ids(model: nn.Module, positions: Callable[[], torch.Tensor]) -> None:
    """Makes a model's attention modules take positions from the step."""
    for module in model.modules():
        if type(module).__name__ in COUNTING:
            module.__dict__["forward"] = CountedForward(module.forward, positions)
