"""Where a server and its workers run: on this machine, or on two nodes of Ray."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import psutil

from benchmarks.multinode.network import Network
from benchmarks.multinode.ray_nodes import RayNodes

# Of two nodes: the server is on the first.
HERE, THERE = 0, 1
CPUS_PER_NODE = 2  # either holds all ranks, where the other is lost


class Place(Protocol):
    """What a server is started by, and what can befall its nodes."""

    @property
    def options(self) -> Sequence[str]:
        """Of `lockstep serve`."""
        ...

    @property
    def variables(self) -> Mapping[str, str]:
        """Of its environment."""
        ...

    @property
    def prefix(self) -> Sequence[str]:
        """What runs its command there."""
        ...

    def workers(self) -> list[psutil.Process]:
        """Those that are no descendants of the server."""
        ...

    def has_spread(self) -> bool:
        """Whether the node that can be lost has a rank."""
        ...

    def kill_raylet(self) -> None:
        """Takes a node away, and with it all that Ray runs there."""
        ...

    def cut(self) -> None:
        """Nothing gets from the server's node to the other any more."""
        ...

    def restore(self) -> None:
        """What was taken away or cut off is back."""
        ...


class OneNode:
    """The machine that the server is on, which can't be lost."""

    def __init__(self, launcher: str) -> None:
        self.options = [f"--launcher={launcher}"]
        self.variables: dict[str, str] = {}
        self.prefix: list[str] = []

    def workers(self) -> list[psutil.Process]:
        return []

    def has_spread(self) -> bool:
        return False

    def kill_raylet(self) -> None:
        raise RuntimeError("there is no raylet but the server's own: it needs --nodes 2")

    def cut(self) -> None:
        raise RuntimeError("there is no network between nodes: it needs --nodes 2")

    def restore(self) -> None:
        """Nothing was."""


class TwoNodes:
    """Two hosts of a network on this machine, each a node of Ray."""

    def __init__(self, nodes: RayNodes) -> None:
        self._nodes = nodes
        self._is_whole = True
        self.options = [
            *("--launcher=ray", f"--ray-address={nodes.address}", "--placement=spread"),
            f"--host={nodes.network.addresses[HERE]}",
        ]
        self.variables = nodes.environment
        self.prefix = nodes.network.command(HERE, [])

    def workers(self) -> list[psutil.Process]:
        return [each for host in (HERE, THERE) for each in self._workers_on(host)]

    def has_spread(self) -> bool:
        return bool(self._workers_on(THERE))

    def kill_raylet(self) -> None:
        self._is_whole = False
        self._nodes.kill_raylet(THERE)

    def cut(self) -> None:
        self._is_whole = False
        self._nodes.network.cut(HERE, THERE)

    def restore(self) -> None:
        if self._is_whole:
            return
        self._nodes.network.heal()
        # Ray takes no node back that it has given up, and it may have.
        if self._nodes.processes(THERE):
            self._nodes.kill_raylet(THERE)
        self._nodes.restart(THERE)
        self._is_whole = True

    def _workers_on(self, host: int) -> list[psutil.Process]:
        return [each for each in self._nodes.processes(host) if _is_worker(each)]


@contextmanager
def place(launcher: str, num_nodes: int) -> Iterator[Place]:
    """While the block runs. Raises ConfigError: no network can be made here."""
    if num_nodes == 1:
        yield OneNode(launcher)
        return
    with Network(num_nodes) as network, RayNodes(network, cpus_per_node=CPUS_PER_NODE) as nodes:
        yield TwoNodes(nodes)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "WorkerActor" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
