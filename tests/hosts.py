"""Hosts and Ray nodes on this machine, for tests that need several."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from benchmarks.multinode.network import Network
from benchmarks.multinode.ray_nodes import RayNodes
from runtime.errors import ConfigError
from tests.cluster.stack import Server


@contextmanager
def network(num_hosts: int, *, is_split: bool = False, delay_s: float = 0.0) -> Iterator[Network]:
    """As Network; skips where namespaces aren't allowed."""
    try:
        made = Network(num_hosts, is_split=is_split, delay_s=delay_s)
    except ConfigError as error:
        pytest.skip(str(error))
    with made:
        yield made


@contextmanager
def serving_on(nodes: RayNodes, *options: str) -> Iterator[Server]:
    """A server on the first host, whose ranks are where Ray places them; it isn't waited for."""
    server = Server(
        "--launcher=ray",
        f"--ray-address={nodes.address}",
        f"--host={nodes.network.addresses[0]}",
        *options,
        prefix=nodes.network.command(0, []),
        **nodes.environment,
    )
    try:
        yield server
    finally:
        server.kill()


def ranks_on(nodes: RayNodes, host: int) -> list[psutil.Process]:
    """The processes there that hold a rank."""
    return [
        process for process in nodes.processes(host) if "WorkerActor" in "".join(process.cmdline())
    ]
