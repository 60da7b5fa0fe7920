"""A worker lives as long as its driver says; a driver notices a worker that is silent."""

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import grpc
import pytest

from protos import worker_pb2
from runtime.cluster.base import WorkerAddress
from runtime.cluster.heartbeat import NUM_RENEWALS, Heartbeat
from runtime.cluster.worker_client import WorkerClient
from tests.transport import EPOCH, TIMEOUT_S, TOKEN, Client, FakeModel
from workers.lease import TICK_S, Lease
from workers.server import WorkerServer, serve

pytestmark = pytest.mark.wire

LEASE_S = 1.0


@pytest.fixture
def expired() -> threading.Event:
    return threading.Event()


@pytest.fixture
def worker(expired: threading.Event) -> Iterator[WorkerServer]:
    model = FakeModel()
    server = serve("127.0.0.1", TOKEN, model.side(), on_expired=expired.set)
    yield server
    model.gate.set()
    server.close()


def address_of(worker: WorkerServer) -> WorkerAddress:
    return WorkerAddress(rank=0, node="local", host="127.0.0.1", port=worker.port)


@pytest.fixture
def client(worker: WorkerServer) -> Iterator[WorkerClient]:
    client = WorkerClient(address_of(worker), token=TOKEN, epoch=EPOCH)
    yield client
    client.close()


def test_a_lease_that_is_renewed_lasts(
    worker: WorkerServer, client: WorkerClient, expired: threading.Event
) -> None:
    silent: SimpleQueue[tuple[int, str]] = SimpleQueue()
    heartbeat = Heartbeat([client], lease_s=LEASE_S, on_silent=lambda *each: silent.put(each))
    heartbeat.start()
    heartbeat.watch()
    assert not expired.wait(2 * LEASE_S)
    heartbeat.close()
    assert silent.empty()

    assert expired.wait(LEASE_S + TIMEOUT_S), "the driver is gone"


@pytest.mark.full
def test_a_lease_ends_with_shutdown(
    worker: WorkerServer, client: WorkerClient, expired: threading.Event
) -> None:
    heartbeat = Heartbeat([client], lease_s=LEASE_S, on_silent=lambda *each: None)
    heartbeat.start()
    client.shutdown().result()
    heartbeat.close()
    assert not expired.wait(2 * LEASE_S)


class Deaf:
    """A worker that takes renewals and answers none."""

    def __init__(self) -> None:
        self.renewals: SimpleQueue[worker_pb2.LeaseRenewal] = SimpleQueue()
        self.address = WorkerAddress(rank=3, node="local", host="127.0.0.1", port=1)
        self._left = threading.Event()

    def keep_alive(self, renewals: Iterator[worker_pb2.LeaseRenewal]) -> "Deaf":
        threading.Thread(target=self._take, args=(renewals,), daemon=True).start()
        return self

    def renewal(self, number: int, lease_ms: int) -> worker_pb2.LeaseRenewal:
        return worker_pb2.LeaseRenewal(epoch=EPOCH, number=number, lease_ms=lease_ms)

    def cancel(self) -> None:
        self._left.set()

    def __iter__(self) -> "Deaf":
        return self

    def __next__(self) -> worker_pb2.LeaseRenewal:
        self._left.wait(TIMEOUT_S)
        raise StopIteration

    def _take(self, renewals: Iterator[worker_pb2.LeaseRenewal]) -> None:
        for renewal in renewals:
            self.renewals.put(renewal)


def test_a_silent_rank_is_told_once_it_is_watched() -> None:
    silent: SimpleQueue[tuple[int, str]] = SimpleQueue()
    deaf = Deaf()
    heartbeat = Heartbeat([deaf], lease_s=0.2, on_silent=lambda *each: silent.put(each))
    heartbeat.start()
    for _ in range(2 * NUM_RENEWALS):  # while it loads
        deaf.renewals.get(timeout=TIMEOUT_S)
    with pytest.raises(Empty):
        silent.get_nowait()
    heartbeat.watch()
    assert silent.get(timeout=TIMEOUT_S) == (0, "it has been silent for 0.2 s")
    heartbeat.close()


def test_a_lease_of_nothing_is_refused(worker: WorkerServer, expired: threading.Event) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        client = Client(channel)
        renewals = iter([worker_pb2.LeaseRenewal(epoch=EPOCH, number=1)])
        call = client.stub.KeepAlive(renewals, metadata=client.metadata, timeout=TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "lease_ms=0 must be at least 1"
    assert not expired.wait(4 * TICK_S)


def test_ticks_count_and_not_seconds() -> None:
    """A worker that was stopped for long has counted nothing meanwhile."""
    expired = threading.Event()
    lease = Lease(expired.set)
    lease.renew(4 * TICK_S)
    lease.renew(8 * TICK_S)
    assert not expired.wait(6 * TICK_S), "the last renewal is what counts"
    assert expired.wait(TIMEOUT_S)
