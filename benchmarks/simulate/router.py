"""Which replica a request goes to. A router knows how many requests each has in flight."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Literal, Protocol

from benchmarks.simulate.workload import SimulatedRequest

RouterName = Literal["round_robin", "least_loaded", "prefix"]
# A prefix's replica may have so many times the mean load before others take some of it.
LOAD_FACTOR = 1.25


class Router(Protocol):
    def choose(self, request: SimulatedRequest, loads: Sequence[int]) -> int:
        """The replica for `request`; `loads` are requests in flight, by replica."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: SimulatedRequest, loads: Sequence[int]) -> int:
        self._last = (self._last + 1) % len(loads)
        return self._last


class LeastLoaded:
    """The replica with the fewest requests in flight; the first of several."""

    def choose(self, request: SimulatedRequest, loads: Sequence[int]) -> int:
        return loads.index(min(loads))


class PrefixAffinity:
    """The same replica for the same prefix, as long as it isn't much busier than the others.

    Replicas are ranked for each prefix by a hash of both (rendezvous hashing), and the first one
    whose load is bounded is taken. Requests without a prefix go where the load is least.
    """

    def __init__(self) -> None:
        self._rankings: dict[str, list[int]] = {}

    def choose(self, request: SimulatedRequest, loads: Sequence[int]) -> int:
        if not request.prefix:
            return loads.index(min(loads))
        ranking = self._rankings.get(request.prefix)
        if ranking is None:
            ranking = self._rankings[request.prefix] = sorted(
                range(len(loads)),
                key=lambda replica: sha256(f"{request.prefix} {replica}".encode()).digest(),
            )
        bound = LOAD_FACTOR * sum(loads) / len(loads) + 1
        # The least loaded one is always within the bound.
        return next(replica for replica in ranking if loads[replica] <= bound)


def make_router(name: RouterName) -> Router:
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "prefix":
            return PrefixAffinity()
