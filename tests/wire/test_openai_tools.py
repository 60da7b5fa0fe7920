"""Tools of chats: what is parsed of outputs, and what is forced."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from runtime.frontend.parsers.call_schema import call_schema
from tests.openai import (
    CHAT,
    HERMES_TEMPLATE,
    TOOL,
    RunningApp,
    SayingEngine,
    chat,
    chat_body,
    events,
    http_client,
    refused,
    write_model,
)

pytestmark = pytest.mark.wire

CALLS = (
    "let me look <tool_call>\n"
    '{"name": "look", "arguments": {"at": "door"}}\n'
    "</tool_call><tool_call>\n"
    '{"name": "look", "arguments": {"at": "fox"}}\n'
    "</tool_call>"
)
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    with RunningApp(SayingEngine(folder), folder, template=HERMES_TEMPLATE) as app:
        yield app


@pytest.fixture
def engine(app: RunningApp) -> SayingEngine:
    engine: SayingEngine = app.engine
    engine.texts = [CALLS]
    engine.requests.clear()
    return engine


@pytest.fixture
def client(app: RunningApp, engine: SayingEngine) -> Iterator[httpx2.Client]:
    with http_client(app) as client:
        yield client


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [each["function"] for each in message["tool_calls"]]
    return [(each["name"], json.loads(each["arguments"])) for each in calls]


def streamed_calls(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put together as the official client does."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for part in chunk["choices"][0]["delta"].get("tool_calls", []):
            if part["index"] == len(calls):
                assert part.keys() == {"index", "id", "type", "function"}
                assert part["type"] == "function"
                assert part["function"].keys() == {"name", "arguments"}
                assert part["function"]["arguments"] == ""
                calls.append({"id": part["id"], "function": dict(part["function"])})
                continue
            assert part.keys() == {"index", "function"}
            assert part["index"] == len(calls) - 1
            assert part["function"].keys() == {"arguments"}
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    return calls


def test_calls_are_parsed_of_an_output(client: httpx2.Client) -> None:
    (choice,) = chat(client, tools=[TOOL])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"].strip() == "let me look"
    assert calls_of(choice["message"]) == [("look", {"at": "door"}), ("look", {"at": "fox"})]
    ids = {each["id"] for each in choice["message"]["tool_calls"]}
    assert len(ids) == 2


def test_streamed_calls_are_those_of_the_whole_answer(client: httpx2.Client) -> None:
    chunks = events(client, CHAT, chat_body(tools=[TOOL]))
    calls = streamed_calls(chunks)
    assert calls_of({"tool_calls": calls}) == [("look", {"at": "door"}), ("look", {"at": "fox"})]
    assert len({each["id"] for each in calls}) == 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert not any("tool_call" in json.dumps(each["choices"][0]["delta"].get("content"))
                   for each in chunks)  # fmt: skip


def test_without_parallel_calls_there_is_one(client: httpx2.Client) -> None:
    fields = {"tools": [TOOL], "parallel_tool_calls": False}
    (choice,) = chat(client, **fields)["choices"]
    assert calls_of(choice["message"]) == [("look", {"at": "door"})]
    assert len(streamed_calls(events(client, CHAT, chat_body(**fields)))) == 1


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}])
def test_without_tools_all_is_content(
    client: httpx2.Client, engine: SayingEngine, fields: dict[str, Any]
) -> None:
    (choice,) = chat(client, **fields)["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALLS, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert "tool_call" not in engine.tokenizer.decode([*engine.requests[0].prompt_token_ids])


def test_the_template_gets_the_tools(client: httpx2.Client, engine: SayingEngine) -> None:
    chat(client, tools=[TOOL])
    assert '"name": "look"' in engine.tokenizer.decode([*engine.requests[0].prompt_token_ids])
    assert engine.requests[0].params.structure is None


@pytest.mark.parametrize(
    ("choice", "parallel", "name", "reason"),
    [
        ("required", None, None, "tool_calls"),
        ("required", False, None, "tool_calls"),
        (NAMED, None, "look", "stop"),
    ],
)
def test_a_call_can_be_forced(
    client: httpx2.Client,
    engine: SayingEngine,
    choice: object,
    parallel: bool | None,
    name: str | None,
    reason: str,
) -> None:
    is_list = name is None and parallel is None
    call = {"name": "look", "arguments": {"at": "fox"}}
    engine.texts = [json.dumps([call, call] if is_list else call)]
    body = chat_body(tools=[TOOL], tool_choice=choice, parallel_tool_calls=parallel)
    (answered,) = chat(client, **body)["choices"]
    assert calls_of(answered["message"]) == [("look", {"at": "fox"})] * (2 if is_list else 1)
    assert answered["message"]["content"] is None
    assert answered["finish_reason"] == reason
    chunks = events(client, CHAT, body)
    assert calls_of({"tool_calls": streamed_calls(chunks)}) == calls_of(answered["message"])
    assert chunks[-1]["choices"][0]["finish_reason"] == reason
    structure = engine.requests[0].params.structure
    assert structure is not None
    assert structure.text == call_schema([TOOL], name=name, parallel=is_list)


def test_a_forced_call_that_is_cut_tells_length(
    client: httpx2.Client, engine: SayingEngine
) -> None:
    engine.texts = [json.dumps([{"name": "look", "arguments": {"at": "fox"}}])]
    (choice,) = chat(client, tools=[TOOL], tool_choice="required", max_tokens=40)["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert not call["function"]["arguments"].endswith("}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [3]}, "tools[0]=3 must be an object"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type='custom' can't be served: must be"),
        ({"tools": [{"type": "function"}]}, "tools[0].function is null: must be an object"),
        (
            {"tools": [{"type": "function", "function": {"name": ""}}]},
            "tools[0].function.name='' must be a text, not empty",
        ),
        ({"tool_choice": "required"}, "tool_choice='required' is set without tools"),
        ({"tool_choice": NAMED}, "tool_choice=an object of 2 entries is set without tools"),
        ({"tools": [TOOL], "tool_choice": "must"}, "tool_choice='must' must be 'none', 'auto',"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.type='allowed_tools' can't be served: must be 'function'",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function"}},
            "tool_choice.function.name is missing: it must name a function",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "run"}}},
            "tool_choice names 'run': it must be a function of tools, which has look",
        ),
        ({"tools": [TOOL] * 1025}, "tools has 1025 entries: must be at most 1024"),
    ],
)
def test_wrong_tools_are_refused_by_name(
    client: httpx2.Client, fields: dict[str, Any], message: str
) -> None:
    assert refused(client.post(CHAT, json=chat_body(**fields)))["message"].startswith(message)


def test_answers_to_calls_reach_the_template(client: httpx2.Client, engine: SayingEngine) -> None:
    (choice,) = chat(client, tools=[TOOL])["choices"]
    calls = choice["message"]["tool_calls"]
    messages = [
        {"role": "user", "content": "look"},
        choice["message"],
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "a brown door"},
    ]
    chat(client, messages, tools=[TOOL])
    assert "a brown door" in engine.tokenizer.decode([*engine.requests[-1].prompt_token_ids])
