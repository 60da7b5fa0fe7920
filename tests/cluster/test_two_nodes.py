"""One model over several hosts, which are network namespaces with a Ray node each."""

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from benchmarks.multinode.ray_nodes import RayNodes
from tests.cluster.stack import Answer, Server, collect, request, serving
from tests.hosts import network, ranks_on, serving_on
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STREAM_S = 120.0
NUM_STREAMS = 4
NUM_TOKENS = 100
LEASE_S = 10.0
LONG_AGO_S = 2.0 + LEASE_S  # by then a lease that nobody renews has run out
# One thread a rank: two wait for each other wherever a core is busy.
OPTIONS = ("--dtype=float32", "--kv-memory=64MiB", "--threads-per-rank=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def wanted(model: Path) -> list[Answer]:
    """What one rank on one host gives."""
    with serving(f"--model={model}", "--launcher=local", "--tp=1", *OPTIONS) as server:
        return streams(server)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """Two hosts with room for two ranks each, and a second network that leads nowhere."""
    with network(2, is_split=True) as hosts, RayNodes(hosts, cpus_per_node=2) as started:
        yield started


def streams(server: Server, begun: threading.Barrier | None = None) -> list[Answer]:
    """All at once; where there is `begun`, each waits there once it has got something."""

    def stream(number: int) -> Answer:
        wanted = request([1, 2, number], max_tokens=NUM_TOKENS, ignore_eos=True, seed=number)
        responses = server.stub().Generate(wanted, metadata=server.key, timeout=STREAM_S)

        def watched() -> Iterator[object]:
            for count, response in enumerate(responses):
                if count == 2 and begun is not None:
                    begun.wait(STREAM_S)
                yield response

        return collect(watched())

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(stream, range(3, 3 + NUM_STREAMS)))


def disturbed(server: Server, fault: Callable[[], object]) -> list[Answer]:
    """The answers of streams among whose tokens something happens."""
    begun = threading.Barrier(NUM_STREAMS + 1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(streams, server, begun)
        begun.wait(STREAM_S)
        fault()
        return running.result()


def finish(server: Server) -> str:
    """Ends the server as an operator does; returns its log."""
    server.process.terminate()
    _, log = server.process.communicate(timeout=20)
    assert server.process.returncode == 0, log
    return log


@pytest.mark.full
def test_two_hosts_give_the_tokens_of_one(
    nodes: RayNodes, model: Path, wanted: list[Answer]
) -> None:
    with serving_on(
        nodes, f"--model={model}", "--tp=2", "--placement=strict_spread", "--verbose", *OPTIONS
    ) as server:
        server.wait_until_ready()
        found = streams(server)
        assert [len(ranks_on(nodes, host)) for host in (0, 1)] == [1, 1]
        log = finish(server)

    assert found == wanted
    for rank, address in enumerate(nodes.network.addresses):
        assert f"rank {rank} on node {address} exchanges tensors by eth0 ({address})" in log


@pytest.mark.full
def test_requests_outlive_a_rank_of_the_other_host(
    nodes: RayNodes, model: Path, wanted: list[Answer]
) -> None:
    with serving_on(nodes, f"--model={model}", "--tp=2", "--placement=spread", *OPTIONS) as server:
        server.wait_until_ready()
        found = disturbed(server, ranks_on(nodes, 1)[0].kill)
        assert "the workers are back" in finish(server)

    assert found == wanted


@pytest.mark.full
def test_requests_outlive_a_host(nodes: RayNodes, model: Path, wanted: list[Answer]) -> None:
    try:
        with serving_on(
            nodes, f"--model={model}", "--tp=2", "--placement=spread", *OPTIONS
        ) as server:
            server.wait_until_ready()
            found = disturbed(server, lambda: nodes.kill_raylet(1))
            assert len(ranks_on(nodes, 0)) == 2
            assert "the workers are back" in finish(server)
    finally:
        nodes.restart(1)

    assert found == wanted


@pytest.mark.full
def test_requests_outlive_the_way_to_a_host(
    nodes: RayNodes, model: Path, wanted: list[Answer]
) -> None:
    try:
        with serving_on(
            nodes, f"--model={model}", "--tp=2", "--placement=spread", *OPTIONS
        ) as server:
            server.wait_until_ready()
            cut_off = ranks_on(nodes, 1)
            found = disturbed(server, lambda: nodes.network.cut(0, 1))
            _, alive = psutil.wait_procs(cut_off, LONG_AGO_S)
            assert cut_off != alive == []
            assert len(ranks_on(nodes, 0)) == 2
            assert "the workers are back" in finish(server)
    finally:
        nodes.network.heal()
        # Ray may have given it up, and then it ends by itself.
        nodes.kill_raylet(1)
        nodes.restart(1)

    assert found == wanted


@pytest.mark.full
def test_a_start_tells_what_each_host_lacks(nodes: RayNodes, model: Path) -> None:
    with serving_on(
        nodes, f"--model={model}", "--tp=3", "--placement=strict_pack", "--startup-timeout-s=7"
    ) as server:
        _, log = server.process.communicate(timeout=STREAM_S)

    lack = "3 ranks want 3 CPU on one node; the nodes are "
    assert f"waiting for Ray to place the workers: {lack}" in log
    assert f"Ray placed no workers within startup_timeout_s=7: {lack}" in log
    for address in nodes.network.addresses:
        assert f"{address} with 2 of 2 CPU free" in log


@pytest.mark.full
def test_ranks_that_cannot_reach_each_other_are_named(model: Path, wanted: list[Answer]) -> None:
    """The driver reaches both, and has no rank on its own host, which has no room for one."""
    with (
        network(3) as hosts,
        RayNodes(hosts, cpus_per_node=1, head_cpus=0) as nodes,
    ):
        hosts.cut(1, 2)
        options = (f"--model={model}", "--tp=2", *OPTIONS)
        with serving_on(nodes, *options) as server:
            _, log = server.process.communicate(timeout=STREAM_S)
        assert server.process.returncode != 0
        told = re.findall(
            r"rank (\d) on node (\S+) can't reach rank (\d) on node (\S+) at (\S+):\d+: No route",
            log,
        )
        assert sorted(each[0] + each[2] for each in told) == ["01", "10"], log
        assert {each[1] for each in told} == {each[3] for each in told} == set(hosts.addresses[1:])
        assert all(host == target for *_, host, target in told)
        assert "ranks connect to each other at any port" in log

        hosts.heal()
        with serving_on(nodes, *options) as server:
            server.wait_until_ready()
            assert streams(server) == wanted
            finish(server)
