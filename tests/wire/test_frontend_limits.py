"""How many calls and connections a frontend's gRPC port takes."""

import socket
from contextlib import ExitStack, suppress

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.auth import bearer
from runtime.engine_service import EngineServer
from runtime.frontend import grpc_server
from runtime.frontend.grpc_service import RETRY_HEADER
from runtime.request import FinishReason, RequestOutput
from tests.frontend import API_KEY, Client, FakeEngine, RunningFrontend
from tests.http2 import greeting

pytestmark = pytest.mark.wire

TIMEOUT_S = 30
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def test_requests_beyond_the_most_are_refused_at_once(
    engine: FakeEngine, server: EngineServer
) -> None:
    with (
        RunningFrontend(server, max_requests=2) as frontend,
        grpc.insecure_channel(frontend.address) as channel,
    ):
        client = Client(channel)
        running = [client.generate("two words") for _ in range(2)]
        requests = [engine.added.get(timeout=TIMEOUT_S) for _ in running]
        refused = client.generate("two words")
        assert refused.code() is EXHAUSTED
        assert "2 requests are under way and max_requests=2 may be" in refused.details()
        assert (RETRY_HEADER, "1000") in refused.trailing_metadata()
        headers = dict(bearer(API_KEY))
        scraped = httpx2.get(f"http://{frontend.http_address}/metrics", headers=headers).text
        assert 'lockstep_rejections_total{reason="overloaded"} 1.0' in scraped.splitlines()
        for connection, request in requests:
            connection.sink([RequestOutput(request.request_id, (5,), FinishReason.LENGTH)])
        for call in running:
            assert list(call)
        admitted = client.generate("two words")
        engine.added.get(timeout=TIMEOUT_S)
        admitted.cancel()


def test_calls_without_a_slot_are_limited_too(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watching the health needs no key."""
    monkeypatch.setattr(grpc_server, "OTHER_CALLS", 7)
    with (
        RunningFrontend(server, max_requests=1) as frontend,
        grpc.insecure_channel(frontend.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S) for _ in range(8)]
        for watch in watches:
            next(watch)
        surplus = stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert surplus.code() is EXHAUSTED
        for watch in watches:
            watch.cancel()


def test_connections_beyond_the_most_are_closed(server: EngineServer) -> None:
    with RunningFrontend(server, max_connections=3) as frontend, ExitStack() as stack:
        host, port = frontend.address.split(":")

        def connect() -> socket.socket:
            connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
            return stack.enter_context(connection)

        for _ in range(3):
            connection = connect()
            connection.sendall(greeting())
            assert connection.recv(1)  # the server's settings
        assert connect().recv(1) == b""
        headers = dict(bearer(API_KEY))
        scraped = httpx2.get(f"http://{frontend.http_address}/metrics", headers=headers).text
        assert 'lockstep_rejections_total{reason="overloaded"} 1.0' in scraped.splitlines()
        connection.close()
        while True:
            again = connect()  # the test's timeout bounds how often
            with suppress(ConnectionError):  # cut off while the other's end isn't yet known
                again.sendall(greeting())
                if again.recv(1):
                    break
