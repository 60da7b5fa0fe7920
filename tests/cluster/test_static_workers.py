"""Workers that somebody else starts, and starts again: their ends, their drivers' ends."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.stack import START_S, Answer, Server, collect, request
from tests.cluster.supervisor import Supervisor
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

TOKEN = secrets.token_hex(16)
NUM_STREAMS = 4
LEASE_S = 2


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Positions enough that no request ends before the test wants it to.
    return save_tiny_model(tmp_path_factory.mktemp("llama"), max_position_embeddings=4096)


@contextmanager
def driver(llama: Path, workers: Supervisor) -> Iterator[Server]:
    """One that may be ready, or refuse to be."""
    server = Server(
        f"--model={llama}",
        "--launcher=static",
        f"--workers={workers.addresses}",
        f"--tp={len(workers.keepers)}",
        "--kv-memory=64MiB",
        "--threads-per-rank=1",
        f"--lease-s={LEASE_S}",
        f"--startup-timeout-s={START_S}",
        LOCKSTEP_WORKER_TOKEN=TOKEN,
    )
    try:
        yield server
    finally:
        server.kill()


def answers(server: Server, on_begun: Callable[[], object] = lambda: None) -> list[Answer]:
    """Of several streams; `on_begun` is called once all of them have begun."""
    calls = [
        server.stub().Generate(
            request([1, 2, seed], max_tokens=300, ignore_eos=True, seed=seed), metadata=server.key
        )
        for seed in range(3, 3 + NUM_STREAMS)
    ]
    firsts = [next(call) for call in calls]
    on_begun()
    return [collect(iter([first, *call])) for first, call in zip(firsts, calls, strict=True)]


def ends(workers: Supervisor) -> list[int]:
    """The exit codes of all, once they have ended."""
    return [each.exit_codes.get(timeout=START_S) for each in workers.keepers]


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_streams_outlive_a_worker_that_somebody_starts_again(llama: Path, tp: int) -> None:
    with Supervisor(tp, TOKEN) as workers, driver(llama, workers) as server:
        one, *others = workers.keepers
        server.wait_until_ready()
        undisturbed = answers(server)
        assert one.process is not None

        assert answers(server, on_begun=one.process.kill) == undisturbed

        assert one.exit_codes.get(timeout=START_S) == -9
        for other in others:
            assert other.exit_codes.get(timeout=START_S) == 0, "its driver has asked it to end"
        assert server.stop() == 0
        assert ends(workers) == [0] * tp


@pytest.mark.full
@pytest.mark.timeout(300)
def test_workers_are_one_drivers_until_it_is_gone(llama: Path) -> None:
    with Supervisor(2, TOKEN) as workers, driver(llama, workers) as first:
        first.wait_until_ready()
        undisturbed = answers(first)
        with driver(llama, workers) as second:
            _, errors = second.process.communicate(timeout=START_S)
        assert second.process.returncode == 2
        assert "has been another driver's for 15 s: that one lives" in errors.splitlines()[-1]
        assert answers(first) == undisturbed

        first.process.kill()
        assert ends(workers) == [1, 1], "its lease has run out"

        with driver(llama, workers) as third:
            assert answers(third.wait_until_ready()) == undisturbed
            assert third.stop() == 0
        assert ends(workers) == [0, 0]
        workers.wait_until_all_serve()
    assert ends(workers) == [0, 0], "SIGTERM has come"
