"""Clients at the gRPC port of a frontend, and what is left once it has stopped."""

import asyncio
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx2
import openai
import pytest

from protos.auth import bearer
from protos.tls import CERT_FILE, KEY_FILE
from runtime.engine_service import EngineServer
from runtime.errors import ConfigError
from tests.cluster_certs import save_nodes
from tests.frontend import API_KEY, TIMEOUT_S, Client, FakeEngine, RunningFrontend
from tests.http2 import PREFACE

pytestmark = pytest.mark.wire

GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"


def connect(frontend: RunningFrontend, data: bytes) -> socket.socket:
    host, port = frontend.address.split(":")
    client = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    client.sendall(data)
    return client


def http_port(frontend: RunningFrontend) -> str:
    return frontend.http_address.partition(":")[2]


def test_a_client_of_http_hears_of_its_port(frontend: RunningFrontend) -> None:
    told = f"this is the gRPC port; HTTP is served on port {http_port(frontend)}"
    url = f"http://{frontend.address}"
    for response in (httpx2.get(url), httpx2.post(f"{url}/v1/completions", json={"a": "b" * 9999})):
        assert response.status_code == 400
        assert response.json()["error"]["message"] == told
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match=told),
    ):
        client.models.list()
    headers = dict(bearer(API_KEY))
    scraped = httpx2.get(f"http://{frontend.http_address}/metrics", headers=headers).text
    assert 'lockstep_rejections_total{reason="invalid"} 3.0' in scraped.splitlines()


def test_with_tls_it_hears_of_that_too(server: EngineServer, tmp_path: Path) -> None:
    nodes = save_nodes(tmp_path)
    files = {"tls_cert": str(nodes.good / CERT_FILE), "tls_key": str(nodes.good / KEY_FILE)}
    with RunningFrontend(server, **files) as frontend:
        told = httpx2.get(f"http://{frontend.address}").json()["error"]["message"]
        assert told == (
            f"this is the gRPC port; HTTP is served on port {http_port(frontend)}, both over TLS"
        )


def test_a_frontend_stops_whoever_is_connected(engine: FakeEngine, server: EngineServer) -> None:
    with RunningFrontend(server) as frontend, ExitStack() as stack:
        clients = [
            stack.enter_context(connect(frontend, data)) for data in (b"", b"PRI", GET, PREFACE)
        ]
        for client in clients[2:]:
            assert client.recv(1)
        channel = stack.enter_context(grpc.insecure_channel(frontend.address))
        call = Client(channel).generate(token_ids=[5])
        engine.added.get(timeout=TIMEOUT_S)
        frontend.cancel()
        with pytest.raises(asyncio.CancelledError):
            frontend.ended.result(timeout=TIMEOUT_S)
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        for client in clients:
            while client.recv(1 << 16):
                pass


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary folders are made; pytest's own has too long a name for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_the_socket_is_for_nobody_else_and_does_not_stay(
    server: EngineServer, folder: Path
) -> None:
    with RunningFrontend(server) as frontend, grpc.insecure_channel(frontend.address) as channel:
        Client(channel).call("GetModel")
        (made,) = folder.iterdir()
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        assert [each.is_socket() for each in made.iterdir()] == [True]
    assert list(folder.iterdir()) == []


def test_a_folder_that_sockets_cannot_be_in_is_refused(server: EngineServer, folder: Path) -> None:
    long = folder / ("a" * 100)
    long.mkdir()
    for unusable, reason in (
        (long, r"gRPC server can't listen"),
        (folder / "none", "No such file"),
    ):
        tempfile.tempdir = str(unusable)
        with (
            pytest.raises(ConfigError, match=rf"{reason}.*TMPDIR"),
            RunningFrontend(server, port=0),
        ):
            pass
    shutil.rmtree(long)
