"""Streams of events: what ends them, what they tell of usage, and readers who are slow."""

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from runtime.errors import CapacityError, InvalidRequestError, ModelOutputError
from tests.openai import (
    CHAT,
    COMPLETIONS,
    TIMEOUT_S,
    RunningApp,
    SayingEngine,
    chat_body,
    events,
    http_client,
    refused,
    write_model,
)

pytestmark = pytest.mark.wire

BODIES = {
    COMPLETIONS: {"model": "tiny", "prompt": "two words", "max_tokens": 50},
    CHAT: chat_body(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[RunningApp]:
    with RunningApp(SayingEngine(folder), folder) as app:
        yield app


@pytest.fixture
def engine(app: RunningApp) -> SayingEngine:
    engine: SayingEngine = app.engine
    engine.texts = ["the fox"]
    engine.failure = None
    return engine


@pytest.fixture
def client(app: RunningApp, engine: SayingEngine) -> Iterator[httpx2.Client]:
    with http_client(app) as client:
        yield client


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("options", "has_usage"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": True, "include_obfuscation": False}}, True),
    ],
)
def test_the_five_forms_of_stream_options(
    client: httpx2.Client, path: str, options: dict[str, Any], has_usage: bool
) -> None:
    chunks = events(client, path, BODIES[path] | options)
    if not has_usage:
        assert not any("usage" in each for each in chunks)
        return
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"].keys() == {
        *("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"),
    }
    assert others
    assert all(each["usage"] is None and len(each["choices"]) == 1 for each in others)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream_options": {}}, "stream_options is set: only set it with stream=true"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats isn't known here: leave it out",
        ),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage='yes' must be true or false",
        ),
        (
            {"stream": True, "stream_options": True},
            "stream_options=true must be an object",
        ),
        ({"stream": "true"}, "stream='true' must be true or false"),
        (
            {"stream": True, "prompt_logprobs": 1},
            "prompt_logprobs=1 is set with stream=true: leave one out",
        ),
    ],
)
def test_wrong_options_of_streams_are_refused(
    client: httpx2.Client, path: str, fields: dict[str, Any], message: str
) -> None:
    assert refused(client.post(path, json=BODIES[path] | fields))["message"] == message


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_that_fails_before_its_first_token_has_a_status(
    client: httpx2.Client, engine: SayingEngine, path: str
) -> None:
    engine.fails_after = 0
    engine.failure = CapacityError("the queue is full", retry_after_s=1.2)
    response = client.post(path, json=BODIES[path] | {"stream": True})
    assert refused(response, 429)["message"] == "the queue is full"
    assert response.headers["retry-after"] == "2"
    engine.failure = InvalidRequestError("regex: it is none")
    assert refused(client.post(path, json=BODIES[path] | {"stream": True}))["param"] == "regex"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_in_a_stream_is_its_last_event(
    client: httpx2.Client, engine: SayingEngine, app: RunningApp, path: str
) -> None:
    engine.fails_after = 2
    engine.failure = ModelOutputError("the logits are no numbers")
    response = client.post(path, json=BODIES[path] | {"stream": True})
    assert response.status_code == 200
    *chunks, last, rest = response.text.split("\n\n")
    assert chunks
    assert rest == ""
    assert json.loads(last.removeprefix("data: ")) == {
        "error": {
            "message": "the logits are no numbers",
            "type": "server_error",
            "param": None,
            "code": None,
        }
    }


def test_nothing_but_the_request_that_failed_is_affected(
    client: httpx2.Client, engine: SayingEngine
) -> None:
    engine.failure = ModelOutputError("the logits are no numbers")
    response = client.post(COMPLETIONS, json=BODIES[COMPLETIONS])
    assert refused(response, 500)["type"] == "server_error"
    engine.failure = None
    assert events(client, COMPLETIONS, BODIES[COMPLETIONS])


def test_headers_of_a_stream_keep_proxies_from_gathering_it(client: httpx2.Client) -> None:
    body = BODIES[CHAT] | {"stream": True}
    with client.stream("POST", CHAT, json=body, headers={"X-Request-Id": "mine"}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"] == "mine"


def test_a_reader_that_takes_nothing_is_given_up(folder: Path) -> None:
    engine = SayingEngine(folder)
    engine.texts = ["x" * 4000]
    body = json.dumps(chat_body(logprobs=True, top_logprobs=20, stream=True)).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\ncontent-length: "
        + str(len(body)).encode()
        + b"\r\n\r\n"
        + body
    )
    with (
        RunningApp(engine, folder, write_timeout_s=0.3) as app,
        socket.create_connection(app.address) as reader,
    ):
        reader.sendall(request)
        assert app.metrics.ended.get(timeout=TIMEOUT_S) == (CHAT, "cancelled")


@pytest.mark.parametrize("stream", [False, True])
def test_the_name_in_a_body_is_that_of_logs_and_headers_too(
    client: httpx2.Client, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "runtime.frontend.observer")
    body = chat_body(request_id="order-42", stream=stream)
    response = client.post(CHAT, json=body, headers={"X-Request-Id": "other"})
    assert response.headers["x-request-id"] == "order-42"
    wrong = client.post(CHAT, json=body | {"max_tokens": 10**9}, headers={"X-Request-Id": "other"})
    assert (wrong.status_code, wrong.headers["x-request-id"]) == (400, "order-42")
    logged = [each.__dict__["request_id"] for each in caplog.records]
    assert logged == ["order-42", "order-42"]
