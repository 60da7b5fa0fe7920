"""`lockstep top` against a frontend."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO

import pytest
from rich.console import Console

from runtime.cli import EXIT_CONFIG
from runtime.engine_service import EngineServer
from runtime.errors import ConfigError, UnavailableError
from runtime.top import fetch, render, show
from tests.frontend import API_KEY, TIMEOUT_S, RunningFrontend

pytestmark = pytest.mark.wire

OTHER = b'{"model": {"name": "x"}, "engines": {"a": {"num_steps": 1}}}'


def test_it_shows_what_the_engine_tells(
    frontend: RunningFrontend, capsys: pytest.CaptureFixture[str]
) -> None:
    show(f"http://{frontend.http_address}", API_KEY, interval_s=1.0, once=True)
    shown = capsys.readouterr().out
    for word in ("tiny at", "running of", "waiting", "blocks", "schedule", "TTFT", "ranks"):
        assert word in shown


def test_rates_are_between_two_looks(frontend: RunningFrontend) -> None:
    now = fetch(f"http://{frontend.http_address}", API_KEY)
    (address,) = now["engines"]
    engine = now["engines"][address]
    before = now | {
        "engines": {
            address: engine | {"num_output_tokens": engine["num_output_tokens"] - 10},
        }
    }
    assert ", 5.0/s" in text_of(render(now, before, 2.0))
    assert "/s" not in text_of(render(before, now, 2.0)), "the engine has begun anew"


def test_a_wrong_key_and_nobody_there_are_told_apart(frontend: RunningFrontend) -> None:
    with pytest.raises(ConfigError, match="takes no such key"):
        fetch(f"http://{frontend.http_address}", "wrong")
    with pytest.raises(UnavailableError, match="can't be reached"):
        fetch("http://127.0.0.1:1", API_KEY)


@pytest.mark.parametrize(
    "url", ["", "foo", "ftp://x", "file:///etc", "http://[::1", "http://a:b", f"http://{'a' * 70}"]
)
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"url={url!r}")):
        fetch(url, API_KEY)


def test_a_key_that_cant_be_sent_is_told_without_it() -> None:
    with pytest.raises(ConfigError, match="api_key of 7 characters must be") as caught:
        fetch("http://127.0.0.1:1", "secret\n")
    assert "secret" not in str(caught.value)


def test_a_port_of_grpc_is_told(frontend: RunningFrontend, server: EngineServer) -> None:
    port = frontend.http_address.partition(":")[2]
    with pytest.raises(ConfigError, match=rf"no server's HTTP port: .* is served on port {port}"):
        fetch(f"http://{frontend.address}", API_KEY)
    with pytest.raises(ConfigError, match="doesn't speak HTTP: give the server's HTTP port"):
        fetch(f"http://127.0.0.1:{server.port}", API_KEY)


def test_another_server_that_refuses_is_told() -> None:
    with (
        serving(b"no", status=400) as url,
        pytest.raises(ConfigError, match="no server's HTTP port: it answers with status 400"),
    ):
        fetch(url, None)


@pytest.mark.parametrize("content", [OTHER, b"", b"[]", b"\xff", b'{"model": {}, "engines": {}}'])
def test_another_server_is_told(content: bytes) -> None:
    with serving(content) as url, pytest.raises(ConfigError, match="answers something else than"):
        fetch(url, None)


def test_an_answer_that_is_cut_is_a_lost_server() -> None:
    with (
        serving(b"{}", length=100) as url,
        pytest.raises(UnavailableError, match="can't be reached: IncompleteRead"),
    ):
        fetch(url, None)


def test_a_wrong_port_is_one_sentence_and_an_exit_code(frontend: RunningFrontend) -> None:
    command = [sys.executable, "-m", "runtime", "top", "--url", f"http://{frontend.address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == EXIT_CONFIG
    assert done.stderr.startswith(f"lockstep: http://{frontend.address} is no server's HTTP")
    assert len(done.stderr.splitlines()) == 1


@contextmanager
def serving(content: bytes, *, status: int = 200, length: int | None = None) -> Iterator[str]:
    """A server that answers one request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content) if length is None else length))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.timeout = TIMEOUT_S
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        thread.join(TIMEOUT_S)


def text_of(rendered: object) -> str:
    written = StringIO()
    Console(width=200, file=written).print(rendered)
    return written.getvalue()
