"""The token that every port asks for, on both kinds of server."""

import asyncio
import hashlib
import hmac
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos.auth import AioTokenInterceptor, KeyRing, Metadata, TokenInterceptor, bearer

pytestmark = pytest.mark.wire

TIMEOUT_S = 10.0
WRONG: list[Metadata] = [
    (),
    bearer("wrong"),
    bearer("righ"),
    (("authorization", "right"),),
    (("authorization", "bearer right"),),
    (("x-authorization", "Bearer right"),),
]
RING = KeyRing.of_tokens({"first": "one", "right": "two", "good": "two"})


def check(port: int, metadata: Metadata) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            stub.Check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    exempt = getattr(request, "param", frozenset())
    server = grpc.server(ThreadPoolExecutor(1), interceptors=[TokenInterceptor("right", exempt)])
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    number = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield number
    server.stop(None).wait()


def test_the_right_token_passes(port: int) -> None:
    assert check(port, bearer("right")) is grpc.StatusCode.OK


@pytest.mark.parametrize("metadata", WRONG)
def test_another_token_is_refused(port: int, metadata: Metadata) -> None:
    assert check(port, metadata) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("port", [frozenset({"/grpc.health.v1.Health/"})], indirect=True)
def test_an_exempt_service_asks_for_none(port: int) -> None:
    assert check(port, ()) is grpc.StatusCode.OK


def test_a_stranger_who_sends_nothing_holds_no_thread(port: int) -> None:
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/any/Method")(iter(requests.get, None), timeout=TIMEOUT_S)
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
        requests.put(None)

    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        (bearer("right"), grpc.StatusCode.OK),
        (bearer("good"), grpc.StatusCode.OK),
        *((metadata, grpc.StatusCode.UNAUTHENTICATED) for metadata in WRONG),
    ],
)
def test_an_aio_server_asks_the_same(metadata: Metadata, code: grpc.StatusCode) -> None:
    async def ask() -> grpc.StatusCode:
        server = grpc.aio.server(interceptors=[AioTokenInterceptor(RING)])
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await asyncio.to_thread(check, port, metadata)
        finally:
            await server.stop(None)

    assert asyncio.run(ask()) is code


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        (bearer("first"), "one"),
        (bearer("right"), "two"),
        (bearer("good"), "two"),
        ((("x-tenant", "one"), *bearer("right")), "two"),
        ((("authorization", b"Bearer first"), *bearer("right")), "two"),
        *((metadata, None) for metadata in WRONG),
    ],
)
def test_a_token_tells_whose_it_is(metadata: Metadata, name: str | None) -> None:
    assert RING.name_of(metadata) == name


@pytest.mark.parametrize("token", ["first", "good", "wrong"])
def test_every_token_is_compared_whichever_is_right(
    monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def count(sent: bytes, expected: bytes) -> bool:
        compared.append(expected)
        return compare(sent, expected)

    monkeypatch.setattr(hmac, "compare_digest", count)
    RING.name_of(bearer(token))
    assert compared == [hashlib.sha256(each).digest() for each in (b"first", b"right", b"good")]


def test_a_ring_keeps_no_token() -> None:
    kept = repr(vars(KeyRing.of_tokens({"right": "two"})))
    assert "two" in kept
    assert "right" not in kept


@pytest.mark.parametrize("name", ["right", b"right", hashlib.sha256(b"right").hexdigest()])
def test_a_ring_of_digests_takes_nothing_else(name: str | bytes) -> None:
    KeyRing({hashlib.sha256(b"right").digest(): "one"})
    with pytest.raises(ValueError, match="must be its digest"):
        KeyRing({name: "one"})


@pytest.mark.parametrize("token", ["", "schlüssel", "\udcff", "right "])
def test_a_token_of_another_kind_of_request_may_be_anything(token: str) -> None:
    assert RING.name_of_token(token) is None
    assert RING.name_of_token("right") == "two"


def test_a_name_may_be_empty() -> None:
    assert KeyRing.of_tokens({"right": ""}).name_of(bearer("right")) == ""


def test_a_ring_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no token"):
        KeyRing.of_tokens({})


@pytest.mark.parametrize("token", ["", "with\nnewline", "schlüssel", " padded "])
def test_a_token_that_cannot_be_sent_is_refused(token: str) -> None:
    with pytest.raises(ValueError, match="token"):
        TokenInterceptor(token)
    with pytest.raises(ValueError, match="token"):
        KeyRing.of_tokens({"right": "one", token: "two"})
