"""Every port of ours and those who may not use it: the wrong certificate, the wrong token."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos import tls
from protos.auth import AioTokenInterceptor, KeyRing, bearer
from runtime.cluster.base import WorkerAddress
from runtime.cluster.worker_client import WorkerClient
from runtime.engine_service import EngineServer
from runtime.errors import UnavailableError, WorkerError
from runtime.frontend.engine_client import EngineClient
from tests.cluster_certs import Nodes, save_nodes, unchecked_client, unchecked_server
from tests.frontend import EchoEngine, FakeEngine, ask, make_model
from tests.params import complete_params
from tests.transport import EPOCH, TIMEOUT_S, TOKEN, FakeModel
from workers.server import serve

pytestmark = pytest.mark.wire

Client = Callable[[Nodes], grpc.ChannelCredentials | None]
OK = "ok"
HUNG_UP = "it hung up at once: cluster_certs must be set on both sides"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Nodes:
    return save_nodes(tmp_path_factory.mktemp("nodes"))


def use_engine(
    server: grpc.ServerCredentials | None, client: grpc.ChannelCredentials | None, token: str
) -> str:
    """What a frontend hears from an engine's port."""

    async def ask() -> str:
        try:
            connected = await EngineClient.connect(f"127.0.0.1:{port.port}", token, client)
        except UnavailableError as error:
            return str(error)
        await connected.close()
        return OK

    port = EngineServer(FakeEngine(make_model()), TOKEN, credentials=server)
    port.start()
    try:
        return asyncio.run(ask())
    finally:
        port.stop(grace_s=5)


def use_worker(port: int, client: grpc.ChannelCredentials | None, token: str) -> str:
    """What the driver hears from a worker's port."""
    address = WorkerAddress(rank=0, node="local", host="127.0.0.1", port=port)
    worker = WorkerClient(address, token=token, epoch=EPOCH, credentials=client)
    try:
        worker.open_rendezvous(2, TIMEOUT_S)
    except WorkerError as error:
        return str(error)
    finally:
        worker.close()
    return OK


@contextmanager
def worker_port(nodes: Nodes | None) -> Iterator[int]:
    certs = None if nodes is None else str(nodes.good)
    server = serve("127.0.0.1", TOKEN, FakeModel().side(), certs)
    try:
        yield server.port
    finally:
        server.close()


def good(nodes: Nodes) -> grpc.ChannelCredentials:
    return tls.channel_credentials(nodes.good)


CLIENTS: list[tuple[Client, str, str]] = [
    (good, TOKEN, OK),
    (good, "another", "UNAUTHENTICATED: this call needs the metadata"),
    (lambda nodes: None, TOKEN, HUNG_UP),
    (lambda nodes: unchecked_client(nodes.good, with_certificate=False), TOKEN, HUNG_UP),
    (lambda nodes: unchecked_client(nodes.expired), TOKEN, HUNG_UP),
    (
        lambda nodes: tls.channel_credentials(nodes.stranger),
        TOKEN,
        "its certificate is of another CA than ours",
    ),
]


@pytest.mark.parametrize(("client", "token", "heard"), CLIENTS)
def test_an_engine_answers_only_its_cluster(
    client: Client, token: str, heard: str, nodes: Nodes
) -> None:
    assert heard in use_engine(tls.server_credentials(nodes.good), client(nodes), token)


def test_tokens_travel_over_mutual_tls(nodes: Nodes) -> None:
    engine = EchoEngine(make_model())
    port = EngineServer(engine, TOKEN, credentials=tls.server_credentials(nodes.good))
    port.start()
    engine.answer(1)

    async def echo() -> list[int]:
        client = await EngineClient.connect(f"127.0.0.1:{port.port}", TOKEN, good(nodes))
        params = complete_params(max_tokens=8)
        session = ask(client, [3, 4, 5], params, seed=1)
        async with asyncio.timeout(TIMEOUT_S), aclosing(session) as outputs:
            tokens = [token async for output in outputs for token in output.token_ids]
        await client.close()
        return tokens

    try:
        assert asyncio.run(echo()) == [3, 4, 5]
    finally:
        port.stop(grace_s=5)


@pytest.mark.parametrize(("client", "token", "heard"), CLIENTS)
def test_a_worker_answers_only_its_cluster(
    client: Client, token: str, heard: str, nodes: Nodes
) -> None:
    with worker_port(nodes) as port:
        assert heard in use_worker(port, client(nodes), token)


@pytest.mark.parametrize(
    ("server", "heard"),
    [
        (lambda nodes: None, "it speaks no TLS: set cluster_certs there too"),
        (lambda nodes: unchecked_server(nodes.expired), "its certificate has expired"),
        (lambda nodes: unchecked_server(nodes.misnamed), "isn't made out to lockstep-cluster"),
        (lambda nodes: unchecked_server(nodes.stranger), "of another CA than ours"),
    ],
)
def test_a_frontend_takes_no_other_engine(
    server: Callable[[Nodes], grpc.ServerCredentials | None], heard: str, nodes: Nodes
) -> None:
    assert heard in use_engine(server(nodes), unchecked_client(nodes.good), TOKEN)


def test_a_driver_takes_no_worker_without_tls(nodes: Nodes) -> None:
    with worker_port(None) as port:
        assert use_worker(port, None, TOKEN) == OK
        assert "rank 0 failed in OpenRendezvous: UNAVAILABLE: it speaks no TLS" in use_worker(
            port, good(nodes), TOKEN
        )


def test_a_worker_with_a_bad_certificate_does_not_start(nodes: Nodes) -> None:
    with pytest.raises(ValueError, match=r"expired/node\.pem can't be used"):
        serve("127.0.0.1", TOKEN, FakeModel().side(), str(nodes.expired))


def call(port: int, channel_credentials: grpc.ChannelCredentials | None, key: str) -> object:
    """What a client of a public port gets."""
    with tls.open_channel(f"127.0.0.1:{port}", (), channel_credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        try:
            stub.Check(request, metadata=bearer(key), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code()
    return OK


@pytest.mark.parametrize("with_client_ca", [False, True])
@pytest.mark.parametrize(
    ("client", "key", "heard"),
    [
        (good, "key", (OK, OK)),
        (good, "another", (grpc.StatusCode.UNAUTHENTICATED,) * 2),
        (
            lambda nodes: unchecked_client(nodes.good, with_certificate=False),
            "key",
            (OK, grpc.StatusCode.UNAVAILABLE),
        ),
        (
            lambda nodes: unchecked_client(nodes.expired),
            "key",
            (OK, grpc.StatusCode.UNAVAILABLE),
        ),
        (lambda nodes: None, "key", (grpc.StatusCode.UNAVAILABLE,) * 2),
        (
            lambda nodes: unchecked_client(nodes.stranger),
            "key",
            (grpc.StatusCode.UNAVAILABLE,) * 2,
        ),
    ],
)
def test_a_public_port_asks_for_keys_and_where_told_to_for_certificates(
    client: Client, key: str, heard: tuple[object, object], with_client_ca: bool, nodes: Nodes
) -> None:
    ca = nodes.good / "ca.pem" if with_client_ca else None
    shown = tls.public_server_credentials(nodes.good / "node.pem", nodes.good / "node.key", ca)

    async def ask() -> object:
        ring = KeyRing.of_tokens({"key": "tenant"})
        server = grpc.aio.server(interceptors=[AioTokenInterceptor(ring)])
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = tls.add_port(server, "127.0.0.1:0", shown)
        await server.start()
        try:
            return await asyncio.to_thread(call, port, client(nodes), key)
        finally:
            await server.stop(None)

    assert asyncio.run(ask()) == heard[with_client_ca]


def test_what_is_not_of_tls_is_left_as_it_is() -> None:
    refused = "failed to connect to all addresses; last error: ... Connection refused"
    assert tls.explain(refused) == refused
    assert tls.explain("Socket closed") == "Socket closed"
