"""OpenAI's API without HTTP, as files of requests use it."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.errors import InvalidRequestError, ModelOutputError, UnavailableError
from runtime.frontend.openai.errors import NotFoundError
from runtime.frontend.openai.service import Caller
from tests.openai import CHAT, COMPLETIONS, RunningApp, SayingEngine, chat_body, write_model

pytestmark = pytest.mark.wire

BODIES = {COMPLETIONS: {"model": "tiny", "prompt": "two words"}, CHAT: chat_body()}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    with RunningApp(SayingEngine(folder), folder) as app:
        yield app


@pytest.fixture
def engine(app: RunningApp) -> SayingEngine:
    engine: SayingEngine = app.engine
    engine.texts = ["the fox"]
    engine.failure = None
    engine.requests.clear()
    return engine


def answer(app: RunningApp, endpoint: str, body: dict[str, Any], **caller: Any) -> dict[str, Any]:
    content = json.dumps(body).encode()
    return app.call(lambda: app.service.answer(endpoint, content, Caller(**caller)))


def test_bodies_are_answered_as_over_http(app: RunningApp, engine: SayingEngine) -> None:
    completion = answer(app, COMPLETIONS, BODIES[COMPLETIONS], request_id="1", tenant="files")
    assert completion["id"] == "cmpl-1"
    assert completion["choices"][0]["text"] == "the fox"
    chat = answer(app, CHAT, BODIES[CHAT], request_id="2")
    assert chat["choices"][0]["message"]["content"] == "the fox"
    assert [each.tenant for each in engine.requests] == ["files", "default"]


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
def test_streams_are_refused(app: RunningApp, engine: SayingEngine, endpoint: str) -> None:
    with pytest.raises(InvalidRequestError, match="stream=true can't be served here"):
        answer(app, endpoint, BODIES[endpoint] | {"stream": True})
    assert not engine.requests


def test_other_endpoints_are_refused_by_name(app: RunningApp) -> None:
    message = "url='/v1/embeddings' must be /v1/completions or /v1/chat/completions"
    with pytest.raises(InvalidRequestError, match=message):
        answer(app, "/v1/embeddings", {})


def test_errors_are_raised(app: RunningApp, engine: SayingEngine) -> None:
    with pytest.raises(NotFoundError, match="'gpt' isn't served here"):
        answer(app, CHAT, chat_body() | {"model": "gpt"})
    engine.failure = ModelOutputError("the logits are no numbers")
    with pytest.raises(ModelOutputError, match="the logits are no numbers"):
        answer(app, CHAT, BODIES[CHAT])


def test_a_prompt_that_fails_ends_the_others_of_its_request(
    app: RunningApp, engine: SayingEngine
) -> None:
    engine.failure = UnavailableError("gone")
    with pytest.raises(UnavailableError):
        answer(app, COMPLETIONS, BODIES[COMPLETIONS] | {"prompt": ["a", "b", "c"]})
    assert app.call(lambda: num_requests(app)) == 0


def test_chunks_that_nobody_takes_leave_nothing(app: RunningApp, engine: SayingEngine) -> None:
    async def leave() -> None:
        content = json.dumps(BODIES[CHAT] | {"stream": True}).encode()
        async with app.service.answering(CHAT, content, Caller()) as answering:
            assert answering.is_stream
            async for _ in answering.chunks():
                raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        app.call(leave)
    assert app.call(lambda: num_requests(app)) == 0


def test_answers_come_at_once(app: RunningApp, engine: SayingEngine) -> None:
    async def ask_all() -> list[Any]:
        content = json.dumps(BODIES[COMPLETIONS]).encode()
        return await asyncio.gather(
            *(
                app.service.answer(COMPLETIONS, content, Caller(request_id=str(number)))
                for number in range(50)
            )
        )

    ids = [each["id"] for each in app.call(ask_all)]
    assert ids == [f"cmpl-{number}" for number in range(50)]


async def num_requests(app: RunningApp) -> int:
    (client,) = app.pool._clients.values()
    return client.num_requests
