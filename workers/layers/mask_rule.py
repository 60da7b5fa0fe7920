"""Which keys a query sees, found by asking a model's mask function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from workers.errors import ModelError

MaskFunction = Callable[[Any, Any, Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Stands for the mask tensor.

    A model that computes attention itself fails on it, where a missing mask would silently make
    it see the future.
    """

    sees: MaskFunction  # (batch, head, query position, key position) -> bool


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a query sees; at most one of them limits it."""

    window: int = 0  # the last tokens, itself included; 0: no such limit
    chunk: int = 0  # from the last multiple of it on; 0: no such limit


def find_reach(sees: MaskFunction, num_positions: int, device: torch.device) -> Reach:
    """The reach of a causal mask rule over `num_positions` positions.

    Raises ModelError: the rule is neither causal nor causal with a window or in chunks.
    """
    keys = torch.arange(num_positions, device=device)
    zero = keys.new_zeros(())
    last = num_positions - 1

    def first_seen(query: int) -> int:
        """Raises ModelError: what the query sees isn't one run of keys that ends with itself."""
        seen = sees(zero, zero, keys.new_full((), query), keys).expand_as(keys)
        first = int(seen.to(torch.uint8).argmax())
        if not bool((seen == (keys >= first) & (keys <= query)).all()):
            raise ModelError(
                "the model's attention mask is neither causal nor a causal sliding window or "
                "chunk: that isn't built"
            )
        return first

    def sees_first(query: int) -> bool:
        return bool(sees(zero, zero, zero + query, zero))

    if sees_first(last):
        return _confirmed(Reach(), first_seen, last)
    # The first query that doesn't see position 0 tells where a window or chunk ends.
    low, high = 0, last
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if sees_first(middle) else (low, middle)
    reach = Reach(window=high) if first_seen(high) == 1 else Reach(chunk=high)
    return _confirmed(reach, first_seen, last)


def _confirmed(reach: Reach, first_seen: Callable[[int], int], last: int) -> Reach:
    """Raises ModelError: some query sees other keys than `reach` says."""
    size = reach.window or reach.chunk or last + 1
    places = (0, 1, 2, last // 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1)
    for query in sorted({query for query in (*places, last) if 0 <= query <= last}):
        first = query // reach.chunk * reach.chunk if reach.chunk else 0
        if reach.window:
            first = max(0, query - reach.window + 1)
        if first_seen(query) != first:
            raise ModelError(
                f"the model's attention mask has neither a window nor chunks of {size}: query "
                f"{query} sees keys from {first_seen(query)} on"
            )
    return reach
