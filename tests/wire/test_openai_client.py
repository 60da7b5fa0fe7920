"""The official `openai` client, over engines on the oracle and on ranks that obey grammars."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from runtime.grammar.compiler import GrammarCompiler
from tests.openai import (
    CHAT_TEMPLATE,
    COMPLETIONS,
    TIMEOUT_S,
    TOOL,
    RunningApp,
    http_client,
)
from tests.scheduling import oracle_continuation
from tests.served import make_engine, text_of, write_characters
from tests.structured import RandomExecutor, make_compiler, write_tokenizer

pytestmark = pytest.mark.wire

PROMPT = [7, 8, 9]
# The oracle's tokenizer knows no other characters.
CHARACTERS_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = write_characters(tmp_path_factory.mktemp("model"))
    engine, _ = make_engine(path=str(folder), num_blocks=512)
    engine.start()
    with RunningApp(engine, folder, template=CHARACTERS_TEMPLATE) as app:
        yield app
    engine.stop()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, GrammarCompiler]]:
    folder = write_tokenizer(tmp_path_factory.mktemp("obedient"))
    compiler = make_compiler(folder)
    yield folder, compiler
    compiler.close()


@pytest.fixture(scope="module")
def obedient(compiler: tuple[Path, GrammarCompiler]) -> Iterator[RunningApp]:
    folder, each = compiler
    engine, _ = make_engine(RandomExecutor, path=str(folder), compiler=each, num_blocks=2048)
    engine.start()
    with RunningApp(engine, folder, template=CHAT_TEMPLATE) as app:
        yield app
    engine.stop()


def client_options(app: RunningApp, **options: Any) -> dict[str, Any]:
    return {
        "base_url": f"{app.url}/v1",
        "api_key": "key",
        "max_retries": 0,
        "timeout": TIMEOUT_S,
    } | options


@pytest.fixture
def client(oracle: RunningApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**client_options(oracle)) as client:
        yield client


@pytest.fixture
def obeyed(obedient: RunningApp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**client_options(obedient)) as client:
        yield client


def user(content: str) -> Any:
    return {"role": "user", "content": content}


def expected(prompt: list[int], max_tokens: int, seed: int) -> str:
    return text_of(oracle_continuation(prompt, max_tokens=max_tokens, seed=seed))


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["oracle"]
    assert client.models.retrieve("oracle").owned_by == "lockstep"


def test_a_completion_is_what_the_engine_gives(client: openai.OpenAI) -> None:
    for prompt in (PROMPT, text_of(PROMPT)):
        answer = client.completions.create(model="oracle", prompt=prompt, max_tokens=20, seed=5)
        assert answer.choices[0].text == expected(PROMPT, 20, 5)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 20


def test_a_streamed_completion_is_the_whole_one(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="oracle",
            prompt=PROMPT,
            max_tokens=20,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(each.choices[0].text for each in chunks[:-1]) == expected(PROMPT, 20, 5)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 23
    assert all(each.usage is None for each in chunks[:-1])


def test_a_chat_is_answered_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"max_completion_tokens": 20, "seed": 5, "model": "oracle"}
    messages = [user(text_of(PROMPT))]
    answer = client.chat.completions.create(messages=messages, **fields)
    assert answer.choices[0].message.content == expected(PROMPT, 20, 5)
    assert answer.choices[0].finish_reason == "length"
    with client.chat.completions.stream(messages=messages, **fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.current_completion_snapshot
    assert streamed.choices[0].message.content == answer.choices[0].message.content
    assert streamed.choices[0].finish_reason == "length"
    assert kinds[-1] == "content.done"


def test_logprobs_come_in_both_shapes(client: openai.OpenAI) -> None:
    texts = client.completions.create(model="oracle", prompt=PROMPT, max_tokens=3, logprobs=2)
    shape = texts.choices[0].logprobs
    assert shape is not None
    assert shape.top_logprobs is not None
    assert [len(each) for each in shape.top_logprobs] == [2, 2, 2]
    chat = client.chat.completions.create(
        model="oracle",
        messages=[user(text_of(PROMPT))],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert [len(each.top_logprobs) for each in chat.choices[0].logprobs.content] == [2, 2, 2]


def test_an_async_client_gets_many_answers_at_once(oracle: RunningApp) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(**client_options(oracle)) as client:

            async def ask(seed: int) -> str:
                stream = await client.chat.completions.create(
                    model="oracle",
                    messages=[user(text_of(PROMPT))],
                    max_tokens=20,
                    seed=seed,
                    stream=True,
                )
                return "".join([each.choices[0].delta.content or "" async for each in stream])

            return await asyncio.gather(*map(ask, range(20)))

    assert asyncio.run(ask_all()) == [expected(PROMPT, 20, seed) for seed in range(20)]


def test_the_same_request_id_twice_at_once_is_fine(oracle: RunningApp) -> None:
    async def ask_twice() -> list[Any]:
        headers = {"X-Request-Id": "mine"}
        options = client_options(oracle, default_headers=headers)
        async with openai.AsyncOpenAI(**options) as client:
            create = client.completions.with_raw_response.create
            return await asyncio.gather(
                *(
                    create(model="oracle", prompt=PROMPT, max_tokens=50, seed=seed)
                    for seed in (1, 2)
                )
            )

    for seed, raw in zip((1, 2), asyncio.run(ask_twice()), strict=True):
        answer = raw.parse()
        assert (answer.id, raw.headers["x-request-id"]) == ("cmpl-mine", "mine")
        assert answer.choices[0].text == expected(PROMPT, 50, seed)


@pytest.mark.parametrize("label", [b"a" * 129, b"\xe9", b""])
def test_what_is_no_request_id_is_replaced(oracle: RunningApp, label: bytes) -> None:
    body = {"model": "oracle", "prompt": PROMPT, "max_tokens": 1}
    with http_client(oracle) as client:
        response = client.post(COMPLETIONS, json=body, headers={"X-Request-Id": label})
    assert len(response.headers["x-request-id"]) == 32
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="oracle", prompt=PROMPT, temperature=-1)
    assert (wrong.value.param, wrong.value.status_code) == ("temperature", 400)
    with pytest.raises(openai.NotFoundError, match="use /v1/chat/completions"):
        client.responses.create(model="oracle", input="a")
    with pytest.raises(openai.NotFoundError, match="this server generates text alone"):
        client.embeddings.create(model="oracle", input="a")


def test_an_answer_follows_a_json_schema(obeyed: openai.OpenAI) -> None:
    class Sight(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")

        what: Literal["door", "fox"]
        is_brown: bool

    parsed = obeyed.chat.completions.parse(
        model="oracle", messages=[user("look")], response_format=Sight, seed=3
    )
    assert isinstance(parsed.choices[0].message.parsed, Sight)
    with obeyed.chat.completions.stream(
        model="oracle", messages=[user("look")], response_format=Sight, seed=3
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.choices[0].message.parsed


def test_any_json_object_can_be_wanted(obeyed: openai.OpenAI) -> None:
    answers = [
        obeyed.chat.completions.create(
            model="oracle",
            messages=[user("look")],
            response_format={"type": "json_object"},
            max_tokens=400,
            seed=seed,
        ).choices[0]
        for seed in range(4)
    ]
    ended = [each for each in answers if each.finish_reason == "stop"]
    assert ended
    for each in ended:
        assert each.message.content is not None
        assert isinstance(json.loads(each.message.content), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_tool_must_be_called(obeyed: openai.OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {
        "model": "oracle",
        "messages": [user("look")],
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 3,
    }
    (whole,) = obeyed.chat.completions.create(**fields).choices
    assert whole.message.tool_calls is not None
    (call,) = whole.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["at"] in ("door", "fox")
    with obeyed.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.done" in kinds
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert streamed.finish_reason == whole.finish_reason
