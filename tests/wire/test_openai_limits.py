"""Requests that would hold up others are refused, or take room as what they are: many."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from runtime.errors import InvalidRequestError
from runtime.frontend.openai.body import MAX_BRACKETS
from runtime.frontend.openai.completion_body import MAX_ALL_CHOICES
from runtime.frontend.openai.long_bodies import LONG_BODY_BYTES, LongBodies
from runtime.frontend.openai.tools import MAX_TOOLS_BYTES
from runtime.frontend.parsers.call_schema import call_schema
from runtime.frontend.request_slots import RequestSlots
from runtime.sampling_params import MAX_STRUCTURE_BYTES
from tests.openai import (
    CHAT,
    COMPLETIONS,
    HERMES_TEMPLATE,
    TIMEOUT_S,
    TOOL,
    RunningApp,
    SayingEngine,
    chat_body,
    complete,
    http_client,
    refused,
    write_model,
)

pytestmark = pytest.mark.wire

NUM_SLOTS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def slots() -> RequestSlots:
    return RequestSlots(NUM_SLOTS)


@pytest.fixture(scope="module")
def app(folder: Path, slots: RequestSlots) -> Iterator[RunningApp]:
    engine = SayingEngine(folder)
    with RunningApp(engine, folder, template=HERMES_TEMPLATE, take_slot=slots.take) as app:
        yield app


@pytest.fixture
def client(app: RunningApp) -> Iterator[httpx2.Client]:
    app.engine.requests.clear()
    with http_client(app) as client:
        yield client


def test_choices_of_all_prompts_are_bounded(folder: Path) -> None:
    engine = SayingEngine(folder)
    with RunningApp(engine, folder) as app, http_client(app) as client:
        for num_prompts, n in ((MAX_ALL_CHOICES // 128 + 1, 128), (MAX_ALL_CHOICES, 2)):
            body = {"model": "tiny", "prompt": ["a"] * num_prompts, "n": n}
            error = refused(client.post(COMPLETIONS, json=body))
            assert error["param"] == "n"
            assert f"must be at most {MAX_ALL_CHOICES} together" in error["message"]
        assert not engine.requests
        answer = complete(client, ["a"] * (MAX_ALL_CHOICES // 128), n=128, max_tokens=1)
    assert len(answer["choices"]) == MAX_ALL_CHOICES


def test_a_request_takes_a_slot_for_each_prompt_or_none(
    app: RunningApp, client: httpx2.Client, slots: RequestSlots
) -> None:
    with slots.take("default"):
        body = {"model": "tiny", "prompt": ["a"] * NUM_SLOTS}
        response = client.post(COMPLETIONS, json=body)
        assert refused(response, 429)["code"] == "rate_limit_exceeded"
        assert response.headers["retry-after"] == "1"
        assert not app.engine.requests
        assert slots.num_taken == 1
    assert len(complete(client, ["a"] * NUM_SLOTS)["choices"]) == NUM_SLOTS
    app.call(slots.wait_none_taken)  # they are held until the answer is sent whole
    assert slots.num_taken == 0


def test_more_prompts_than_slots_are_never_taken(client: httpx2.Client) -> None:
    body = {"model": "tiny", "prompt": ["a"] * (NUM_SLOTS + 1)}
    error = refused(client.post(COMPLETIONS, json=body))
    assert error["message"].startswith("prompt has 9 entries, each of which counts as a request")
    assert error["param"] == "prompt"


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * 2049}] * 2},
            "messages have 4098 entries in tool_calls together: must be at most 4096",
        ),
        (
            {"messages": [{"role": "user", "content": [PART] * 8193}] * 2},
            "messages have 16386 entries in content together: must be at most 16384",
        ),
        (
            {"tools": [{**TOOL, "about": "x" * (MAX_TOOLS_BYTES // 2)}] * 2},
            f"tools have more than {MAX_TOOLS_BYTES} bytes as JSON",
        ),
        (
            {"chat_template_kwargs": {"a": [[]] * MAX_BRACKETS}},
            f"the body has {MAX_BRACKETS + 5} opening brackets: must be at most {MAX_BRACKETS}",
        ),
    ],
)
def test_what_takes_long_to_look_at_is_refused(
    client: httpx2.Client, fields: dict[str, Any], message: str
) -> None:
    error = refused(client.post(CHAT, json=chat_body() | fields))
    assert error["message"].startswith(message)


def test_tools_that_no_schema_could_hold_are_refused_before_they_are_read() -> None:
    # Its type would be refused, were it read.
    parameters = {"type": "array", "description": "x" * MAX_STRUCTURE_BYTES}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    message = f"tools has parameters of .* must be at most {MAX_STRUCTURE_BYTES}"
    with pytest.raises(InvalidRequestError, match=message):
        call_schema([tool], name=None, parallel=True)
    other = {"type": "function", "function": {"name": "other"}}
    assert "look" not in call_schema([tool, other], name="other", parallel=False)


def test_long_bodies_are_read_on_a_thread_one_after_another() -> None:
    threads: dict[bytes, int] = {}
    begun, released = threading.Event(), threading.Event()

    def read(content: bytes) -> bytes:
        threads[content[:1]] = threading.get_ident()
        if content.startswith(b"first"):
            begun.set()
            assert released.wait(TIMEOUT_S)
        return content[:1]

    async def main() -> None:
        bodies = LongBodies()
        long = b" " * LONG_BODY_BYTES
        tasks = [
            asyncio.create_task(bodies.read(word + long, read)) for word in (b"first", b"second")
        ]
        assert await asyncio.to_thread(begun.wait, TIMEOUT_S)
        assert await bodies.read(b"third", read) == b"t"  # the loop isn't held up
        assert b"s" not in threads
        released.set()
        async with asyncio.timeout(TIMEOUT_S):
            assert await asyncio.gather(*tasks) == [b"f", b"s"]

    asyncio.run(main())
    assert threads[b"t"] == threading.get_ident()
    assert threading.get_ident() not in (threads[b"f"], threads[b"s"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_a_long_body_is_refused_as_a_short_one(client: httpx2.Client, path: str) -> None:
    body = {"model": 3, "prompt": "a", "tokens": [3], "messages": []}
    errors = [
        refused(client.post(path, json=body | {"user": "x" * length}))
        for length in (1, LONG_BODY_BYTES)
    ]
    assert errors[0] == errors[1]
    assert errors[0]["message"] == "model=3 must be a text"
