"""What ranks do together."""

from typing import Protocol

import torch


class Collectives(Protocol):
    """The ranks of one model, seen by one of them; all run the same calls in the same order.

    Calls come from one thread. Each raises CollectiveError: another rank is gone, or runs something
    else. No call can follow one that failed.
    """

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over ranks, written into `tensor`, which is contiguous."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Joins the parts [..., n] to [..., size * n] on every rank."""
        ...

    def gather_to_sampler(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Joins the parts [..., n] to [..., size * n] on the sampler's rank; None elsewhere."""
        ...

    def broadcast_from_sampler(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the sampler's rank has in `tensor`, which is contiguous, overwritten elsewhere."""
        ...

    def limit(self, timeout_s: float) -> None:
        """From now on a wait takes so long at most, where nothing else ends it."""
        ...

    def close(self) -> None:
        """Leaves. May be called twice."""
        ...
