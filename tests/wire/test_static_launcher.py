"""Static workers, here in this process: which are waited for, which are refused."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from runtime.cluster import static_launcher
from runtime.cluster.base import WorkerAddress
from runtime.cluster.clusters import open_cluster
from runtime.cluster.epochs import Epochs
from runtime.cluster.static_launcher import StaticLauncher
from runtime.config import EngineConfig
from runtime.errors import ConfigError, LockstepError, WorkerError
from runtime.progress import StartupProgress
from runtime.scheduling.cache_layout import CacheGroup, CacheLayout
from tests.transport import TIMEOUT_S, TOKEN, Client, FakeModel, running_worker
from workers.errors import CacheError
from workers.server import serve

pytestmark = [pytest.mark.wire, pytest.mark.timeout(60)]

HOST = "127.0.0.1"
LONG_S = 60.0
LAYOUT = CacheLayout(
    block_size=16, num_blocks=32, groups=(CacheGroup(layers=(0, 1), window=0),), block_bytes=1
)


def launcher(
    *ports: int, token: str = TOKEN, timeout_s: float = TIMEOUT_S, claim_s: float = LONG_S
) -> StaticLauncher:
    return StaticLauncher(
        [
            WorkerAddress(rank=rank, node=HOST, host=HOST, port=port)
            for rank, port in enumerate(ports)
        ],
        token=token,
        startup_timeout_s=timeout_s,
        longest_claim_s=claim_s,
    )


def refusal(launcher: StaticLauncher, count: int) -> LockstepError:
    with pytest.raises(LockstepError) as refused:
        launcher.launch(count)
    return refused.value


@contextmanager
def workers(count: int) -> Iterator[list[tuple[Client, int]]]:
    with ExitStack() as stack:
        running = [stack.enter_context(running_worker(FakeModel())) for _ in range(count)]
        yield [(client, server.port) for client, server in running]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set once the launcher has told what it waits for, which it does at once."""
    monkeypatch.setattr(static_launcher, "PATIENCE_S", 0.0)
    heard = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: heard.set()  # type: ignore[method-assign]
    static_launcher.logger.addHandler(handler)
    yield heard
    static_launcher.logger.removeHandler(handler)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def begin(
    thread: ThreadPoolExecutor, launcher: StaticLauncher, count: int, told: threading.Event
) -> "Future[list[WorkerAddress]]":
    """Launches on the thread, and returns once it waits for a worker."""
    launching = thread.submit(launcher.launch, count)
    assert told.wait(TIMEOUT_S)
    assert not launching.done()
    return launching


def test_workers_are_ranks_in_the_order_of_their_addresses() -> None:
    with workers(2) as ((_, one), (_, other)):
        found = launcher(other, one).launch(2)
    assert [(each.rank, each.port) for each in found] == [(0, other), (1, one)]


def test_a_worker_that_comes_late_is_waited_for(
    thread: ThreadPoolExecutor, told: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with workers(1) as ((_, one),):
        with running_worker(FakeModel()) as (_, first):
            port = first.port
        launching = begin(thread, launcher(one, port), 2, told)
        server = serve(HOST, TOKEN, FakeModel().side(), port=port)
        assert [each.port for each in launching.result(TIMEOUT_S)] == [one, port]
        server.close()
    assert f"rank 1 at {HOST}:{port} isn't there" in caplog.text
    assert "what starts them has to start new ones" in caplog.text
    assert "rank 0" not in caplog.text


def test_a_worker_of_an_epoch_that_is_over_is_waited_for(
    thread: ThreadPoolExecutor, told: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with running_worker(FakeModel()) as (client, server):
        client.open_rendezvous()
        launching = begin(thread, launcher(server.port), 1, told)
        client.shutdown()
        server.wait()
        with running_worker(FakeModel(), port=server.port):
            assert len(launching.result(TIMEOUT_S)) == 1
    assert "belongs to another driver, or to an epoch whose lease isn't over" in caplog.text


def test_a_worker_that_another_driver_keeps_is_refused() -> None:
    with workers(2) as ((_, one), (client, other)):
        client.open_rendezvous()
        error = refusal(launcher(one, other, claim_s=0.1), 2)
    assert isinstance(error, ConfigError)
    assert f"rank 1 at {HOST}:{other} has been another driver's for 0.1 s" in str(error)


def test_another_token_is_refused_at_once() -> None:
    with workers(1) as ((client, port),):
        error = refusal(launcher(port, token="another"), 1)
        client.initialize()  # it is still to be had
    assert isinstance(error, ConfigError)
    assert f"rank 0 at {HOST}:{port} asks for another token: LOCKSTEP_WORKER_TOKEN" in str(error)


def test_what_is_no_worker_is_refused_at_once() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port(f"{HOST}:0")
    server.start()
    error = refusal(launcher(port), 1)
    server.stop(None).wait()
    assert isinstance(error, ConfigError)
    assert f"rank 0 at {HOST}:{port} is no worker of this version" in str(error)


def test_the_wait_has_an_end() -> None:
    with running_worker(FakeModel()) as (_, server):
        port = server.port
    error = refusal(launcher(port, timeout_s=0.1), 1)
    assert isinstance(error, WorkerError)
    assert f"after startup_timeout_s=0.1 rank 0 at {HOST}:{port} isn't there" in str(error)


def test_the_wait_ends_where_the_engine_does(
    thread: ThreadPoolExecutor, told: threading.Event
) -> None:
    with running_worker(FakeModel()) as (_, server):
        port = server.port
    waiting = launcher(port)
    launching = begin(thread, waiting, 1, told)
    waiting.close()
    assert "was closed while it waited" in str(launching.exception(TIMEOUT_S))


@pytest.mark.parametrize("token", [None, "", "with\nline"])
def test_the_driver_needs_the_workers_token(
    token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCKSTEP_WORKER_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("LOCKSTEP_WORKER_TOKEN", token)
    with pytest.raises(ConfigError, match="LOCKSTEP_WORKER_TOKEN"):
        open_cluster(EngineConfig(launcher="static", workers="h:1"))


def test_all_epochs_have_the_operators_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_WORKER_TOKEN", "the operator's")
    static = open_cluster(EngineConfig(launcher="static", workers="h:1"))
    assert static.token() == static.token() == "the operator's"
    local = open_cluster(EngineConfig(launcher="local"))
    assert local.token() != local.token()


@contextmanager
def epochs(
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    on_captured: Callable[[int, int], None] = lambda captured, total: None,
) -> Iterator[Epochs]:
    """Those of a driver that has the worker at `port`."""
    monkeypatch.setenv("LOCKSTEP_WORKER_TOKEN", TOKEN)
    config = EngineConfig(launcher="static", workers=f"{HOST}:{port}", startup_timeout_s=TIMEOUT_S)
    with Epochs(config, "m") as made:
        made.start(lambda loaded, total: None)
        made.allocate_cache(LAYOUT, on_captured)
        yield made


def epoch_of(client: Client) -> int:
    """That which the worker tells somebody of another."""
    with pytest.raises(grpc.RpcError) as refused:
        client.shutdown()
    found = re.fullmatch(r"epoch 3 came, this worker is of epoch (\d+)", refused.value.details())
    assert found is not None
    return int(found[1])


def test_the_driver_hears_of_captured_graphs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the place of the bar of loaded weights comes that of the graphs."""
    model = FakeModel(num_graphs=7)
    with running_worker(model) as (_, server), StartupProgress() as progress:
        progress.loaded(5, 10)
        with epochs(server.port, monkeypatch, progress.captured):
            pass

    shown = capsys.readouterr().err
    assert "loading weights" in shown
    assert "capturing CUDA graphs" in shown
    assert "/7.00 " in shown


def test_a_rank_that_refuses_ends_the_wait_for_one_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a collective, while graphs are captured: it would wait until the start's deadline."""
    monkeypatch.setenv("LOCKSTEP_WORKER_TOKEN", TOKEN)
    refused = threading.Event()

    def refuse() -> None:
        raise CacheError("no memory for the graphs on rank 1")

    patient = FakeModel(on_allocate=lambda: refused.wait(TIMEOUT_S))
    with (
        running_worker(patient) as (_, first),
        running_worker(FakeModel(on_allocate=refuse)) as (_, second),
    ):
        config = EngineConfig(
            launcher="static",
            tp=2,
            workers=f"{HOST}:{first.port},{HOST}:{second.port}",
            startup_timeout_s=TIMEOUT_S,
        )
        with Epochs(config, "m") as made:
            made.start(lambda loaded, total: None)
            with pytest.raises(ConfigError, match="no memory for the graphs on rank 1"):
                made.allocate_cache(LAYOUT)
            assert not refused.is_set()
            refused.set()


def test_no_two_drivers_have_the_same_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the one that loses a race for a worker would end it for the other."""
    numbers = set()
    for _ in range(2):
        with (
            running_worker(FakeModel()) as (client, server),
            epochs(server.port, monkeypatch),
        ):
            numbers.add(epoch_of(client))
    assert len(numbers) == 2


def test_a_worker_that_is_left_of_an_epoch_is_asked_to_end(
    thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        client, server = stack.enter_context(running_worker(FakeModel()))
        driver = stack.enter_context(epochs(server.port, monkeypatch))
        first = epoch_of(client)
        restarting = thread.submit(driver.restart)
        assert server.stopped.wait(TIMEOUT_S)
        server.close()
        client, _ = stack.enter_context(running_worker(FakeModel(), port=server.port))
        restarting.result(TIMEOUT_S)
        assert epoch_of(client) == first + 1
