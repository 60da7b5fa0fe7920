"""A rank dies under a running request: the client hears why, and all of it ends."""

import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from tests.cluster.stack import END_S, Server, request
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    # Positions enough that no request ends before the death does.
    model = save_tiny_model(tmp_path, max_position_embeddings=4096)
    server = Server(f"--model={model}", "--launcher=local", "--tp=2").wait_until_ready()
    yield server
    server.kill()
    server.temporary_folder.rmdir()


def member(server: Server, word: str) -> psutil.Process:
    """The last process of the server's family with `word` on its command line."""
    return [each for each in server.family if word in each.cmdline()][-1]


def test_the_death_of_a_rank_is_told_and_ends_the_server(server: Server) -> None:
    endless = request([1, 2, 3], max_tokens=4000, ignore_eos=True)
    streams = [server.stub().Generate(endless, metadata=server.key) for _ in range(8)]
    for stream in streams:
        next(stream)
    member(server, "workers.server").send_signal(signal.SIGKILL)
    codes = set()
    for stream in streams:
        with pytest.raises(grpc.RpcError) as loss:
            list(stream)
        codes.add(loss.value.code())
    assert codes == {grpc.StatusCode.UNAVAILABLE}
    _, errors = server.process.communicate(timeout=END_S)
    assert server.process.returncode == 1
    assert "rank" in errors.strip().splitlines()[-1]
    assert server.survivors() == []


@pytest.mark.full
def test_a_rank_that_stops_while_idle_is_noticed(server: Server) -> None:
    """Its process lives and its port is open: only unanswered pings tell."""
    member(server, "workers.server").suspend()
    _, errors = server.process.communicate(timeout=40)
    assert server.process.returncode == 1
    assert "its stream broke" in errors.strip().splitlines()[-1]
    assert server.survivors() == []


def test_nothing_outlives_a_driver_that_is_killed(server: Server) -> None:
    server.process.kill()
    assert server.survivors() == []
