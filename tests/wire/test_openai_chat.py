"""/v1/chat/completions over an engine that says what the test wants; tools have their own file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tokenizers

from tests.openai import (
    CHAT,
    CREATED,
    THINKING_TEMPLATE,
    TOOL,
    RunningApp,
    SayingEngine,
    chat,
    chat_body,
    events,
    http_client,
    logprobs_of,
    refused,
    write_model,
)

pytestmark = pytest.mark.wire


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
    engine.requests.clear()
    return engine


@pytest.fixture
def client(app: RunningApp, engine: SayingEngine) -> Iterator[httpx2.Client]:
    with http_client(app) as client:
        yield client


@pytest.fixture(scope="module")
def thinking(folder: Path) -> Iterator[RunningApp]:
    with RunningApp(SayingEngine(folder), folder, template=THINKING_TEMPLATE) as app:
        yield app


def prompt_of(engine: SayingEngine) -> str:
    return engine.tokenizer.decode(list(engine.requests[-1].prompt_token_ids))


def deltas_of(chunks: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    choices = [choice for each in chunks for choice in each["choices"]]
    return [each["delta"] for each in choices if each["index"] == index]


def test_a_whole_answer_has_openais_shape(client: httpx2.Client, engine: SayingEngine) -> None:
    answer = chat(client, request_id="mine")
    num_prompt = len(engine.requests[0].prompt_token_ids)
    num_output = len(engine.tokens_of("the fox")) + 1
    assert answer == {
        "id": "chatcmpl-mine",
        "object": "chat.completion",
        "created": CREATED,
        "model": "tiny",
        "system_fingerprint": "f" * 32,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "the fox", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_the_role_is_in_the_first_delta_alone_and_the_reason_in_the_last(
    client: httpx2.Client, engine: SayingEngine
) -> None:
    engine.texts = ["the fox", "a dog"]
    chunks = events(client, CHAT, chat_body(n=2, request_id="mine"))
    assert {(each["id"], each["object"]) for each in chunks} == {
        ("chatcmpl-mine", "chat.completion.chunk")
    }
    for index, text in enumerate(engine.texts):
        first, *middle, last = deltas_of(chunks, index)
        assert first == {"role": "assistant", "content": ""}
        assert last == {}
        assert all(each.keys() == {"content"} for each in middle)
        assert "".join(each["content"] for each in middle) == text
        reasons = [
            each["choices"][0]["finish_reason"]
            for each in chunks
            if each["choices"][0]["index"] == index
        ]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_length_is_told_exactly_when_the_cap_was_hit(
    client: httpx2.Client, engine: SayingEngine, name: str
) -> None:
    count = len(engine.tokens_of("the fox"))
    for cap in (1, count, count + 1):
        wanted = "stop" if cap > count else "length"
        assert chat(client, **{name: cap})["choices"][0]["finish_reason"] == wanted
        *_, last = events(client, CHAT, chat_body(**{name: cap}))
        assert last["choices"][0]["finish_reason"] == wanted


def test_all_that_fits_may_come_where_no_cap_is_set(
    client: httpx2.Client, engine: SayingEngine
) -> None:
    chat(client, max_tokens=None)
    (request,) = engine.requests
    assert request.params.max_tokens == 4096 - len(request.prompt_token_ids)


def test_every_role_and_parts_of_texts_reach_the_template(
    client: httpx2.Client, engine: SayingEngine
) -> None:
    parts = [{"type": "text", "text": "lazy "}, {"type": "text", "text": "dog"}]
    messages = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": parts, "name": "somebody"},
        {"role": "assistant", "content": "d", "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "e", "tool_call_id": "call_1"},
    ]
    chat(client, messages)
    assert prompt_of(engine) == (
        "[system] a [system] b [user] lazy dog [assistant] d [tool] e [assistant]"
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty: it must have at least 1 message"),
        ("hello", "messages='hello' must be a list"),
        (["hello"], "messages[0]='hello' must be an object"),
        ([{"role": "robot", "content": "a"}], "messages[0].role='robot' must be one of system,"),
        ([{"content": "a"}], "messages[0].role=null must be one of system, developer, user,"),
        ([{"role": "user"}], "messages[0].content is missing: a message without tool_calls"),
        ([{"role": "user", "content": 3}], "messages[0].content is of type int: must be a text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type='image_url' can't be served: must be 'text'",
        ),
    ],
)
def test_wrong_messages_are_refused_by_name(
    client: httpx2.Client, messages: object, message: str
) -> None:
    error = refused(client.post(CHAT, json={"model": "tiny", "messages": messages}))
    assert error["message"].startswith(message)
    assert error["param"] is not None
    assert error["param"].startswith("messages")


def test_an_answer_can_be_continued(client: httpx2.Client, engine: SayingEngine) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The qui"}]
    chat(client, messages, continue_final_message=True)
    assert prompt_of(engine) == "[user] hi [assistant] The qui"
    chat(client, messages, add_generation_prompt=False)
    assert prompt_of(engine) == "[user] hi [assistant] The qui "


def test_logprobs_have_the_shape_of_chats(client: httpx2.Client, engine: SayingEngine) -> None:
    engine.texts = ["é!"]
    shape = chat(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]
    tokens = [*engine.tokens_of("é!"), 1]
    assert shape["refusal"] is None
    assert [each["logprob"] for each in shape["content"]] == [-token / 8 for token in tokens]
    assert [(each["token"], each["bytes"]) for each in shape["content"][-4:]] == [
        ("bytes:\\xc3", [0xC3]),
        ("bytes:\\xa9", [0xA9]),
        ("!", [0x21]),
        ("</s>", [*b"</s>"]),
    ]
    for token, entry in zip(tokens, shape["content"], strict=True):
        tops = [each["logprob"] for each in entry["top_logprobs"]]
        assert tops == list(logprobs_of(token, 2).top_logprobs)
        assert entry["top_logprobs"][0]["token"] == entry["token"]


def test_logprobs_of_chunks_are_those_of_the_whole_answer(
    client: httpx2.Client, engine: SayingEngine
) -> None:
    engine.texts = ["the é fox"]  # tokens inside é bring no text
    whole = chat(client, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(each["top_logprobs"] == [] for each in whole)
    chunks = [each["choices"][0] for each in events(client, CHAT, chat_body(logprobs=True))]
    told = [each["logprobs"] for each in chunks if each["logprobs"] is not None]
    assert [entry for each in told for entry in each["content"]] == whole


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs": 2}, "top_logprobs=2 is set: it needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 must be in [0, 20]"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs=-1 must be in [0, 20]"),
        ({"logprobs": 2}, "logprobs=2 must be true or false"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1 and at most"),
        ({"max_tokens": -1}, "max_tokens=-1 must be at least 1 and at most"),
        ({"max_completion_tokens": -1}, "max_tokens=-1 must be at least 1 and at most"),
        ({"max_tokens": 10**12}, "max_tokens=1000000000000 must be at least 1 and at most"),
        (
            {"max_tokens": 3, "max_completion_tokens": 4},
            "max_tokens=3 and max_completion_tokens=4 are set: leave one out",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type='xml' must be 'text',"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema is null: must be an object with a schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema is missing: it must be a JSON schema",
        ),
        (
            {"response_format": {"type": "json_object"}, "regex": "a"},
            "regex and response_format are set: at most one may be",
        ),
        (
            {"response_format": {"type": "json_object"}, "tools": [TOOL]},
            "response_format and tools are set: an output that has a form can't call tools",
        ),
        (
            {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages can't be set",
        ),
        ({"functions": [{}]}, "functions=a list of 1 entries can't be served: leave it out"),
        ({"modalities": ["text", "audio"]}, "modalities=a list of 2 entries can't be served"),
        ({"audio": {"voice": "x"}}, "audio=an object of 1 entries can't be served: leave it out"),
        ({"guided_json": {}}, "guided_json isn't known here: use json_schema"),
        ({"use_beam_search": True}, "use_beam_search isn't known here: leave it out"),
    ],
)
def test_wrong_fields_are_refused_by_name(
    client: httpx2.Client, fields: dict[str, Any], message: str
) -> None:
    error = refused(client.post(CHAT, json=chat_body(**fields)))
    assert error["message"].startswith(message)


def test_fields_that_change_nothing_are_taken(client: httpx2.Client) -> None:
    chat(
        client,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        modalities=["text"],
        functions=None,
        function_call=None,
        prediction=None,
        verbosity="medium",
        tools=None,
        tool_choice=None,
        parallel_tool_calls=True,
        response_format={"type": "text"},
        stream=False,
        stream_options=None,
    )


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"b": 1, "a": 2}}},
            {"b": 1, "a": 2},
        ),
        (
            {"type": "json_schema", "json_schema": {"strict": True, "schema": {"type": "null"}}},
            {"type": "null"},
        ),
    ],
)
def test_a_response_format_is_the_form_of_the_output(
    client: httpx2.Client, engine: SayingEngine, form: dict[str, Any], schema: dict[str, Any]
) -> None:
    chat(client, response_format=form)
    structure = engine.requests[0].params.structure
    assert structure is not None
    assert (structure.kind, structure.text) == ("json_schema", json.dumps(schema))


def test_arguments_reach_the_template(folder: Path) -> None:
    template = "{{ reasoning_effort }} {{ mood }} {{ messages[0].content }}"
    engine = SayingEngine(folder)
    with RunningApp(engine, folder, template=template) as app, http_client(app) as client:
        chat(client, reasoning_effort="low", chat_template_kwargs={"mood": "glad"})
        assert prompt_of(engine) == "low glad hello"


def test_reasoning_is_apart_from_the_answer(thinking: RunningApp) -> None:
    thinking.engine.texts = ["<think>\nover the dog?\n</think>\n\nthe fox"]
    with http_client(thinking) as client:
        message = chat(client)["choices"][0]["message"]
        assert message["reasoning_content"] == "over the dog?"
        assert message["content"] == "the fox"
        deltas = deltas_of(events(client, CHAT, chat_body()))
    for name in ("reasoning_content", "content"):
        assert "".join(each.get(name, "") for each in deltas) == message[name]
    assert not any({"reasoning_content", "content"} <= each.keys() for each in deltas)


def test_an_output_with_a_form_has_no_reasoning(thinking: RunningApp) -> None:
    thinking.engine.texts = ["{}"]
    messages = [{"role": "user", "content": "<think>"}]
    with http_client(thinking) as client:
        answer = chat(
            client,
            messages,
            response_format={"type": "json_object"},
            add_generation_prompt=False,
        )
    assert answer["choices"][0]["message"]["content"] == "{}"


def test_a_prompt_that_ends_inside_of_reasoning_goes_on_there(thinking: RunningApp) -> None:
    thinking.engine.texts = ["the dog</think>the fox"]
    messages = [{"role": "user", "content": "<think>"}]
    with http_client(thinking) as client:
        answer = chat(client, messages, add_generation_prompt=False)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("the dog", "the fox")


def test_of_special_tokens_only_those_that_a_parser_looks_for_are_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<think>", "</think>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    engine = SayingEngine(folder)
    engine.texts = ["<think>why<unk></think>the<unk> fox"]
    with (
        RunningApp(engine, folder, template=THINKING_TEMPLATE) as app,
        http_client(app) as client,
    ):
        for fields in ({}, {"skip_special_tokens": True}):
            message = chat(client, **fields)["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("why", "the fox")
        message = chat(client, skip_special_tokens=False)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("why<unk>", "the<unk> fox")
    with RunningApp(engine, folder) as app, http_client(app) as client:
        assert chat(client)["choices"][0]["message"]["content"] == "whythe fox"


@pytest.mark.parametrize(
    ("fields", "num_logprobs", "top_k"),
    [
        ({"logprobs": False, "top_logprobs": 0}, None, 0),
        ({"top_logprobs": 0, "top_k": 0}, None, 0),
        ({"logprobs": True, "top_logprobs": 0, "top_k": -1}, 0, 0),
    ],
)
def test_what_clients_send_for_nothing_means_nothing(
    client: httpx2.Client,
    engine: SayingEngine,
    fields: dict[str, Any],
    num_logprobs: int | None,
    top_k: int,
) -> None:
    chat(client, **fields)
    params = engine.requests[-1].params
    assert (params.logprobs, params.top_k) == (num_logprobs, top_k)


def test_a_model_without_a_template_takes_no_chats(folder: Path) -> None:
    with RunningApp(SayingEngine(folder), folder, template=None) as app, http_client(app) as client:
        error = refused(client.post(CHAT, json=chat_body()))
    assert "has no chat template" in error["message"]


def test_scores_of_the_prompt_are_told_beside_the_choices(client: httpx2.Client) -> None:
    answer = chat(client, prompt_logprobs=0)
    first, second, *_ = answer["prompt_logprobs"]
    assert first is None
    (entry,) = second.values()
    assert entry.keys() == {"logprob", "decoded_token"}
