"""A frontend over a fake engine: real gRPC on both sides of it."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from runtime.engine_service import EngineServer
from tests.frontend import (
    LINES,
    Client,
    FakeEngine,
    RunningFrontend,
    make_byte_fallback_tokenizer,
    make_model,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_byte_fallback_tokenizer(LINES).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def engine(folder: Path) -> FakeEngine:
    return FakeEngine(make_model(str(folder)))


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[EngineServer]:
    server = EngineServer(engine, "engine-token")
    server.start()
    yield server
    server.stop(grace_s=5)


@pytest.fixture
def frontend(server: EngineServer) -> Iterator[RunningFrontend]:
    with RunningFrontend(server) as frontend:
        yield frontend


@pytest.fixture
def channel(frontend: RunningFrontend) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(frontend.address) as channel:
        yield channel


@pytest.fixture
def client(channel: grpc.Channel) -> Client:
    return Client(channel)
