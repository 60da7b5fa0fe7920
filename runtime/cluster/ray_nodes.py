"""The nodes of the Ray cluster that this process is connected to."""

import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ray

# Ray tells it nowhere else without its dashboard.
from ray._private.state import available_resources_per_node

from runtime.errors import ConfigError

CONNECT_S = 2.0
MAX_CONNECTIONS = 64

# What a strategy asks for beyond resources.
SPREADS = {
    "PACK": "",
    "SPREAD": "",
    "STRICT_PACK": " on one node",
    "STRICT_SPREAD": " on a node each",
}


class Wanted(NamedTuple):
    """What a placement group is to have."""

    bundle: dict[str, float]  # of each rank
    num_ranks: int
    strategy: str  # in Ray's words

    def __str__(self) -> str:
        resources = " and ".join(f"{each * self.num_ranks:g} {name}" for name, each in self.sizes)
        return f"{self.num_ranks} ranks want {resources}{SPREADS[self.strategy]}"

    @property
    def sizes(self) -> Iterable[tuple[str, float]]:
        return self.bundle.items()


def check_bundles(bundles: Sequence[Mapping[str, float]], wanted: Wanted) -> None:
    """Of a placement group that a driver is in. Raises ConfigError: the ranks don't fit in it."""
    fitting = [
        each
        for each in bundles[1 : wanted.num_ranks + 1]
        if all(each.get(name, 0) >= size for name, size in wanted.sizes)
    ]
    if len(fitting) < wanted.num_ranks:
        raise ConfigError(
            f"this driver's placement group has the bundles {[*bundles]}: after the driver's own, "
            f"it must have {wanted.num_ranks}, one for each of tp={wanted.num_ranks} ranks, with "
            f"{wanted.bundle} each"
        )


def find_unreachable() -> frozenset[str]:
    """Ids of nodes that Ray takes for alive, and that this process can't connect to.

    Ray takes a minute to notice, and an attempt to place a rank there holds up all for longer.
    """
    nodes = _alive_nodes()
    with ThreadPoolExecutor(MAX_CONNECTIONS, "reach-nodes") as pool:
        reached = pool.map(_is_reached, nodes)
        return frozenset(
            node["NodeID"] for node, is_there in zip(nodes, reached, strict=True) if not is_there
        )


def other_than(nodes: frozenset[str]) -> dict[str, str]:
    """A bundle's label selector that keeps it off these nodes."""
    return {"ray.io/node-id": f"!in({','.join(sorted(nodes))})"} if nodes else {}


def describe_nodes(wanted: Wanted, unreachable: frozenset[str]) -> str:
    """What each has of what is wanted."""
    available: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]

    def describe(node: dict[str, Any]) -> str:
        if node["NodeID"] in unreachable:
            return f"{node['NodeManagerAddress']}, which can't be reached"
        free = available.get(node["NodeID"], {})
        return f"{node['NodeManagerAddress']} with " + ", ".join(
            f"{free.get(name, 0):g} of {node['Resources'].get(name, 0):g} {name} free"
            for name, _ in wanted.sizes
        )

    return "; ".join(map(describe, _alive_nodes()))


def _alive_nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def _is_reached(node: dict[str, Any]) -> bool:
    try:
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        socket.create_connection(address, CONNECT_S).close()
    except OSError:
        return False
    return True
