"""Clients that leave: the engine stops working for them at once, and keeps nothing."""

import json
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.engine import Engine
from tests.openai import CHAT, COMPLETIONS, TIMEOUT_S, RunningApp, complete, http_client
from tests.served import UnhurriedOracle, make_engine, text_of, write_characters

pytestmark = pytest.mark.wire

MAX_TOKENS = 1500
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_characters(tmp_path_factory.mktemp("model"))
    engine, _ = make_engine(UnhurriedOracle, path=str(folder), num_blocks=1024)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def app(engine: Engine) -> Iterator[RunningApp]:
    with RunningApp(engine, Path(engine.model.path), template=TEMPLATE) as app:
        yield app


def start(app: RunningApp, path: str, **fields: Any) -> socket.socket:
    """A client that has sent a request that would run for long."""
    body: dict[str, Any] = {"model": "oracle", "max_tokens": MAX_TOKENS, "ignore_eos": True}
    if path == COMPLETIONS:
        body["prompt"] = [7] * 40
    else:
        body["messages"] = [{"role": "user", "content": text_of([7] * 40)}]
    content = json.dumps(body | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-length: {len(content)}\r\n\r\n"
    client = socket.create_connection(app.address, timeout=TIMEOUT_S)
    client.sendall(head.encode() + content)
    return client


def read_events(client: socket.socket, count: int) -> None:
    """Reads until so many events have begun."""
    received = b""
    while received.count(b"data: ") < count:
        part = client.recv(1 << 16)
        assert part, received
        received += part


def wait_running(engine: Engine, app: RunningApp) -> None:
    """Until the engine works for a request."""
    with http_client(app) as client:
        while not engine.stats().num_running:
            client.get("/health")  # a round trip; the test's timeout bounds them


def wait_idle(engine: Engine, app: RunningApp) -> None:
    """Until nothing is left of any request, at either end."""
    with http_client(app) as client:
        while engine.stats().num_running or engine.stats().num_waiting:
            client.get("/health")
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert app.call(lambda: open_requests(app)) == 0


async def open_requests(app: RunningApp) -> int:
    (client,) = app.pool._clients.values()
    return client.num_requests


def end_of(app: RunningApp) -> tuple[str, str]:
    return app.metrics.ended.get(timeout=TIMEOUT_S)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("count", [0, 1, 30])
def test_a_reader_of_a_stream_that_leaves_ends_its_request(
    engine: Engine, app: RunningApp, path: str, count: int
) -> None:
    before = engine.stats().num_output_tokens
    client = start(app, path, stream=True, n=2)
    wait_running(engine, app)
    read_events(client, count)
    client.close()
    assert end_of(app) == (path, "cancelled")
    wait_idle(engine, app)
    assert engine.stats().num_output_tokens - before < 2 * MAX_TOKENS


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_who_waits_for_a_whole_answer_and_leaves_ends_its_request(
    engine: Engine, app: RunningApp, path: str
) -> None:
    before = engine.stats().num_output_tokens
    client = start(app, path)
    wait_running(engine, app)
    client.close()
    assert end_of(app) == (path, "cancelled")
    wait_idle(engine, app)
    assert engine.stats().num_output_tokens - before < MAX_TOKENS


def test_all_prompts_of_a_request_end_together(engine: Engine, app: RunningApp) -> None:
    client = start(app, COMPLETIONS, prompt=[[7] * 9, [8] * 9, [9] * 9], stream=True)
    read_events(client, 5)
    client.close()
    assert end_of(app) == (COMPLETIONS, "cancelled")
    wait_idle(engine, app)


def leave_at_random(engine: Engine, app: RunningApp, count: int) -> None:
    draw = random.Random(5)
    for _ in range(count):
        path = draw.choice([COMPLETIONS, CHAT])
        is_stream = draw.random() < 0.6
        client = start(app, path, stream=is_stream, n=draw.choice([1, 1, 3]))
        if is_stream:
            read_events(client, draw.choice([0, 0, 1, 2, 5, 20]))
        elif draw.random() < 0.5:
            wait_running(engine, app)
        client.close()
    for _ in range(count):
        _, status = end_of(app)
        assert status == "cancelled"
    wait_idle(engine, app)
    with http_client(app) as client:
        assert complete(client, [7], model="oracle", max_tokens=2)
    assert end_of(app) == (COMPLETIONS, "ok")


def test_forty_clients_leave_at_random(engine: Engine, app: RunningApp) -> None:
    leave_at_random(engine, app, 40)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_five_hundred_clients_leave_at_random(engine: Engine, app: RunningApp) -> None:
    leave_at_random(engine, app, 500)


def test_a_client_that_leaves_inside_of_its_body_is_forgotten(
    engine: Engine, app: RunningApp
) -> None:
    client = socket.create_connection(app.address, timeout=TIMEOUT_S)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: 99\r\n\r\n{")
    client.close()
    with http_client(app) as other:
        complete(other, [7], model="oracle", max_tokens=2)
    assert end_of(app) == (COMPLETIONS, "ok")
    wait_idle(engine, app)
