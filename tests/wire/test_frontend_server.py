"""A frontend's port from start to end: keys, health, what ends it and how."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.auth import bearer
from runtime.engine_service import EngineServer
from runtime.errors import (
    ConfigError,
    UnavailableError,
)
from tests.frontend import (
    API_KEY,
    TIMEOUT_S,
    Client,
    FakeEngine,
    RunningFrontend,
    make_model,
    status_of,
)

pytestmark = pytest.mark.wire

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING


def test_a_stranger_is_refused_everywhere_but_at_health(channel: grpc.Channel) -> None:
    stranger = Client(channel, "wrong")
    assert status_of(stranger.generate("two"))[0] == grpc.StatusCode.UNAUTHENTICATED
    for method in ("Tokenize", "Detokenize", "GetModel", "GetStats"):
        with pytest.raises(grpc.RpcError) as raised:
            stranger.call(method)
        assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert status_of(list_services(channel))[0] == grpc.StatusCode.UNAUTHENTICATED
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", "lockstep.v1.Inference"):
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        assert reply.status == SERVING


def list_services(channel: grpc.Channel, metadata: object = None) -> grpc.Call:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    return stub.ServerReflectionInfo(iter([ask]), metadata=metadata, timeout=TIMEOUT_S)


def test_reflection_is_off_unless_asked_for(channel: grpc.Channel) -> None:
    assert status_of(list_services(channel, bearer(API_KEY)))[0] == grpc.StatusCode.UNIMPLEMENTED


def test_reflection_names_the_services(server: EngineServer) -> None:
    with (
        RunningFrontend(server, reflection=True) as frontend,
        grpc.insecure_channel(frontend.address) as channel,
    ):
        (reply,) = list_services(channel, bearer(API_KEY))
    names = {service.name for service in reply.list_services_response.service}
    assert {"lockstep.v1.Inference", "grpc.health.v1.Health"} <= names


def test_the_end_of_the_engine_is_the_end_of_the_frontend(
    engine: FakeEngine, server: EngineServer, frontend: RunningFrontend, channel: grpc.Channel
) -> None:
    running = [Client(channel).generate("two"), Client(channel).generate("words")]
    for _ in running:  # a message on its way when the stream ends would change gRPC's reason
        engine.added.get(timeout=TIMEOUT_S)
    watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
    )
    assert next(watch).status == SERVING
    server.stop(grace_s=5)
    assert next(watch).status == NOT_SERVING
    for call in running:
        assert status_of(call) == (
            grpc.StatusCode.UNAVAILABLE,
            "the engine is gone: UNAVAILABLE: the engine is stopping",
        )
    with pytest.raises(UnavailableError, match="the engine is stopping"):
        frontend.ended.result(timeout=TIMEOUT_S)


def test_a_stopped_frontend_tells_its_clients_and_leaves_the_engine(
    engine: FakeEngine, frontend: RunningFrontend, channel: grpc.Channel
) -> None:
    call = Client(channel).generate("two")
    connection, _ = engine.added.get(timeout=TIMEOUT_S)
    frontend.cancel()
    assert status_of(call) == (grpc.StatusCode.UNAVAILABLE, "the frontend is stopping")
    with pytest.raises(asyncio.CancelledError):
        frontend.ended.result(timeout=TIMEOUT_S)
    assert engine.closed.get(timeout=TIMEOUT_S) is connection


def test_a_port_in_use_is_named_before_the_engine_is_asked(
    server: EngineServer, frontend: RunningFrontend
) -> None:
    port = int(frontend.address.rpartition(":")[2])
    with (
        pytest.raises(ConfigError, match=rf"can't listen at 127\.0\.0\.1:{port}.*--port"),
        RunningFrontend(server, port=port),
    ):
        pass


@pytest.mark.parametrize("key", [None, "", "schlüssel"])
def test_a_key_that_is_none_is_refused(server: EngineServer, key: str | None) -> None:
    with pytest.raises(ConfigError, match="api_key"), RunningFrontend(server, api_key=key):
        pass


def test_an_engine_that_is_not_there_is_named(engine: FakeEngine) -> None:
    server = EngineServer(engine, "engine-token")
    server.start()
    server.stop(grace_s=0)
    with (
        pytest.raises(UnavailableError, match=rf"the engine at 127\.0\.0\.1:{server.port} can't"),
        RunningFrontend(server),
    ):
        pass


def test_a_wrong_engine_token_is_told(server: EngineServer) -> None:
    server.token = "another"
    with pytest.raises(UnavailableError, match="UNAUTHENTICATED"), RunningFrontend(server):
        pass


def test_a_broken_tokenizer_file_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    server = EngineServer(FakeEngine(make_model(str(tmp_path))), "engine-token")
    server.start()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"), RunningFrontend(server):
        pass
    server.stop(grace_s=5)
