"""Whether ranks reach each other, asked of real workers whose networks are whole or not."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import grpc
import pytest

from protos import worker_pb2
from runtime.cluster.base import WorkerAddress
from runtime.cluster.reachability import find_places
from runtime.cluster.worker_client import WorkerClient
from runtime.errors import ConfigError, WorkerError
from tests.transport import EPOCH, TIMEOUT_S, TOKEN, FakeModel, running_worker
from workers.reachability import Reachability

pytestmark = pytest.mark.wire

HOST = "127.0.0.1"


@contextmanager
def workers(count: int) -> Iterator[list[WorkerClient]]:
    with ExitStack() as stack:
        clients = []
        for rank in range(count):
            _, server = stack.enter_context(running_worker(FakeModel()))
            client = stack.enter_context(client_of(rank, server.port))
            stack.callback(lambda client=client: client.shutdown().result(TIMEOUT_S))
            clients.append(client)
        yield clients


@contextmanager
def client_of(rank: int, port: int) -> Iterator[WorkerClient]:
    address = WorkerAddress(rank=rank, node="n", host=HOST, port=port)
    with closing(WorkerClient(address, token=TOKEN, epoch=EPOCH)) as client:
        yield client


def find(clients: list[WorkerClient], interface: str = "") -> list[tuple[str, str]]:
    return find_places(clients, interface=interface, device="cpu", timeout_s=TIMEOUT_S)


def test_ranks_tell_by_which_interface_they_exchange_tensors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "runtime.cluster.reachability")
    with workers(3) as clients:
        assert find(clients) == [("lo", HOST)] * 3

    assert caplog.messages[2] == "rank 2 on node 127.0.0.1 exchanges tensors by lo (127.0.0.1)"


def test_a_rank_that_others_cannot_reach_is_named_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listen = Reachability.listen
    heard: list[worker_pb2.ListenRequest] = []

    def close_the_second(
        reachability: Reachability, request: worker_pb2.ListenRequest
    ) -> worker_pb2.ListenReply:
        reply = listen(reachability, request)
        heard.append(request)
        if len(heard) == 2:
            reachability.close()
        return reply

    monkeypatch.setattr(Reachability, "listen", close_the_second)
    with workers(2) as clients, pytest.raises(WorkerError) as refused:
        find(clients)

    words = str(refused.value)
    assert refused.value.is_outside
    assert "rank on node" not in words
    assert words.count("can't reach") == 1
    assert "on node 127.0.0.1 at 127.0.0.1:" in words
    assert "Connection refused: ranks connect to each other at any port" in words


def test_a_rank_that_the_driver_cannot_reach_is_named() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    with (
        workers(1) as clients,
        client_of(1, port) as lost,
        pytest.raises(WorkerError) as refused,
    ):
        find([*clients, lost])

    assert str(refused.value).startswith(
        f"the driver can't reach rank 1 on node 127.0.0.1 at 127.0.0.1:{port}: "
    )


def test_an_interface_that_a_host_lacks_is_the_operators_to_change() -> None:
    with (
        workers(1) as clients,
        pytest.raises(ConfigError, match=r"interface=none9 isn't on host 127\.0\.0\.1; .*lo"),
    ):
        find(clients, "none9")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (worker_pb2.ListenRequest(epoch=EPOCH, host=HOST, device="tpu"), "device=tpu must be one"),
        (worker_pb2.ReachRequest(epoch=EPOCH), r"timeout_ms=0 must be in [1, 60000]"),
        (
            worker_pb2.ReachRequest(
                epoch=EPOCH, timeout_ms=1, endpoints=[worker_pb2.Endpoint(host=HOST, port=0)]
            ),
            "port=0 must be in [1, 65535]",
        ),
        (
            worker_pb2.ReachRequest(
                epoch=EPOCH, timeout_ms=1, endpoints=[worker_pb2.Endpoint()] * 4097
            ),
            "4097 endpoints are more than 4096",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    request_: worker_pb2.ListenRequest | worker_pb2.ReachRequest, words: str
) -> None:
    with running_worker(FakeModel()) as (client, _):
        is_listen = isinstance(request_, worker_pb2.ListenRequest)
        call = client.stub.Listen if is_listen else client.stub.Reach
        with pytest.raises(grpc.RpcError) as refused:
            call(request_, timeout=TIMEOUT_S, metadata=client.metadata)

    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in refused.value.details()


def test_the_port_closes_with_initialize() -> None:
    with running_worker(FakeModel()) as (client, _):
        request = worker_pb2.ListenRequest(epoch=EPOCH, host=HOST, device="cpu")
        reply = client.stub.Listen(request, timeout=TIMEOUT_S, metadata=client.metadata)
        socket.create_connection((reply.address, reply.port), TIMEOUT_S).close()
        client.initialize()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((reply.address, reply.port), TIMEOUT_S)
