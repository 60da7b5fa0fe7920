"""Whether the ranks of a group reach each other, before one of them waits for another in vain."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from protos import worker_pb2
from runtime.cluster.base import WorkerAddress
from runtime.cluster.worker_client import WorkerClient
from runtime.errors import WorkerError

logger = logging.getLogger(__name__)

REACH_S = 5.0  # of each rank to each other
CALL_S = 20.0  # what a rank may take to answer beyond that
MAX_PAIRS_TOLD = 3


class Place(NamedTuple):
    """Where a rank exchanges tensors with others."""

    interface: str
    address: str


class _Pair(NamedTuple):
    """One rank that can't reach another."""

    one: WorkerAddress
    other: WorkerAddress
    target: str
    fault: str

    def __str__(self) -> str:
        return (
            f"rank {self.one.rank} on node {self.one.host} can't reach "
            f"rank {self.other.rank} on node {self.other.host} at {self.target}: {self.fault}"
        )


def find_places(
    clients: Sequence[WorkerClient], *, interface: str, device: str, timeout_s: float
) -> list[Place]:
    """Has each rank choose its interface, and try to reach each other rank there.

    `interface` is the name of one that all hosts have, or "". Raises ConfigError, in a worker's
    words: a host has none as it is wanted. Raises WorkerError: a rank can't reach another one,
    with both; or the driver can't reach a rank.
    """
    call_s = min(CALL_S, timeout_s)
    calls = [
        client.listen(interface=interface, device=device, timeout_s=call_s) for client in clients
    ]
    doors: list[worker_pb2.ListenReply] = [call() for call in calls]
    for client, door in zip(clients, doors, strict=True):
        logger.info(
            "rank %d on node %s exchanges tensors by %s (%s)",
            client.address.rank,
            client.address.host,
            door.interface,
            door.address,
        )
    pairs = _unreached(clients, doors, timeout_s)
    if pairs:
        told = "; ".join(str(pair) for pair in pairs[:MAX_PAIRS_TOLD])
        more = f" (and {len(pairs) - MAX_PAIRS_TOLD} more)" if len(pairs) > MAX_PAIRS_TOLD else ""
        raise WorkerError(
            f"{told}{more}: ranks connect to each other at any port, so let these nodes do so, or "
            "name another network by --interface",
            is_outside=True,
        )
    return [Place(door.interface, door.address) for door in doors]


def _unreached(
    clients: Sequence[WorkerClient], doors: Sequence[worker_pb2.ListenReply], timeout_s: float
) -> list[_Pair]:
    """Every pair of ranks in either direction."""
    endpoints = [worker_pb2.Endpoint(host=door.address, port=door.port) for door in doors]
    each_s = min(REACH_S, timeout_s)
    calls = [
        client.reach(
            [*endpoints[:rank], *endpoints[rank + 1 :]],
            each_s=each_s,
            timeout_s=min(each_s + CALL_S, timeout_s),
        )
        for rank, client in enumerate(clients)
    ]
    pairs = []
    for rank, call in enumerate(calls):
        others = [*range(rank), *range(rank + 1, len(clients))]
        for other, fault in zip(others, call().faults, strict=True):
            if fault:
                door = endpoints[other]
                pairs.append(
                    _Pair(
                        clients[rank].address,
                        clients[other].address,
                        f"{door.host}:{door.port}",
                        fault,
                    )
                )
    return pairs
