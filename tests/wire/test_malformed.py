"""Messages that can't be read end their call with INVALID_ARGUMENT, and leave no traceback."""

import logging
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.auth import bearer
from runtime.engine_service import EngineServer
from runtime.logs import is_wanted
from tests.frontend import API_KEY, TIMEOUT_S, Client, RunningFrontend, status_of
from tests.http2 import greeting, grpc_call
from tests.transport import TOKEN, FakeModel, running_worker

pytestmark = pytest.mark.wire

MALFORMED = b"\x0a\x05ab"  # field 1 of 5 bytes, of which there are 2
PUBLIC = "/lockstep.v1.Inference"
WORKER = "/lockstep.worker.v1.Worker"
HEALTH = "/grpc.health.v1.Health"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    told = filter(is_wanted, caplog.get_records("call"))
    assert [each for each in told if each.levelno >= logging.ERROR] == []


def ends_of(
    channel: grpc.Channel, method: str, token: str, *, streams: bool = False
) -> tuple[grpc.StatusCode, str]:
    """How a call ends that brings a malformed message."""
    options: dict[str, Any] = {"metadata": bearer(token), "timeout": TIMEOUT_S}
    if streams:
        return status_of(channel.stream_stream(method)(iter([MALFORMED]), **options))
    return status_of(channel.unary_stream(method)(MALFORMED, **options))


def check_refused(end: tuple[grpc.StatusCode, str], message: str) -> None:
    code, details = end
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("the message of 4 bytes can't be read: ")
    assert message in details


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize", "GetModel", "GetStats"])
def test_the_public_port_refuses_it(channel: grpc.Channel, method: str) -> None:
    end = ends_of(channel, f"{PUBLIC}/{method}", API_KEY)
    check_refused(end, f"'lockstep.v1.{method}Request'")


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_the_public_health_service_refuses_it(channel: grpc.Channel, method: str) -> None:
    check_refused(ends_of(channel, f"{HEALTH}/{method}", API_KEY), "HealthCheckRequest")


@pytest.mark.parametrize("key", [API_KEY, "wrong"])
def test_a_path_that_is_no_text_ends_its_call_alone(frontend: RunningFrontend, key: str) -> None:
    host, port = frontend.address.split(":")
    with (
        grpc.insecure_channel(frontend.address) as channel,
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as stranger,
    ):
        client = Client(channel)
        client.call("GetModel")
        stranger.sendall(greeting() + grpc_call(f"{PUBLIC}/\xe9", key, b""))
        received = b""
        while b"grpc-status" not in received:
            part = stranger.recv(1 << 16)
            assert part, received
            received += part
        client.call("GetModel")


def test_reflection_refuses_it_and_answers_others(server: EngineServer) -> None:
    with (
        RunningFrontend(server, reflection=True) as frontend,
        grpc.insecure_channel(frontend.address) as channel,
    ):
        check_refused(ends_of(channel, REFLECTION, API_KEY, streams=True), "ReflectionRequest")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(
            iter([request]), metadata=bearer(API_KEY), timeout=TIMEOUT_S
        )
        names = [each.name for each in answer.list_services_response.service]
    assert "lockstep.v1.Inference" in names


def test_the_engine_ends_the_stream_of_a_frontend_that_sends_it(server: EngineServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        method = "/lockstep.engine.v1.Engine/Connect"
        end = ends_of(channel, method, server.token, streams=True)
    check_refused(end, "'lockstep.engine.v1.FrontendMessage'")


@pytest.mark.parametrize(
    "method", ["Listen", "Reach", "OpenRendezvous", "Initialize", "AllocateCache", "Shutdown"]
)
def test_a_worker_refuses_it(method: str) -> None:
    with running_worker(FakeModel()) as (client, server):
        end = ends_of(client.channel, f"{WORKER}/{method}", TOKEN)
        check_refused(end, f"'lockstep.worker.v1.{method}Request'")
        assert not server.stopped.is_set()
        client.initialize()


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_the_health_service_of_a_worker_refuses_it(method: str) -> None:
    with running_worker(FakeModel()) as (client, _):
        end = ends_of(client.channel, f"{HEALTH}/{method}", TOKEN)
        check_refused(end, "HealthCheckRequest")


def test_a_worker_runs_no_step_after_it() -> None:
    with running_worker(FakeModel()) as (client, _):
        client.initialize()
        client.allocate_cache()
        method = f"{WORKER}/Execute"
        check_refused(ends_of(client.channel, method, TOKEN, streams=True), "StepRequest")
        with pytest.raises(grpc.RpcError, match=r"no step can follow .* MalformedError") as refused:
            client.execute()
    assert refused.value.code() is grpc.StatusCode.ABORTED
