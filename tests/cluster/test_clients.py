"""Clients as their users have them, against `lockstep serve` with the embedded model."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import grpc
import openai
import pydantic
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from protos.auth import bearer
from tests.cluster.stack import Server
from tests.demo_server import MODEL, PLACE, check_place, demo_server

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(300)]

TIMEOUT_S = 120
FRANCE = "The capital of France is"
QUESTION: Any = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Where is the Eiffel tower?"},
]
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
CALLING: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "max_tokens": 60,
    "seed": 3,
    "tools": [
        {"type": "function", "function": {"name": name, "parameters": PLACE}}
        for name in ("look", "travel")
    ],
}
NAMED = {"type": "function", "function": {"name": "travel"}}


class Place(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    city: Literal["Paris", "London"]
    far: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with demo_server("--reflection", "--max-model-len=128") as server:
        yield server


def client_options(server: Server) -> dict[str, Any]:
    return {
        "base_url": f"{server.http_address}/v1",
        "api_key": server.api_key,
        "max_retries": 0,
        "timeout": TIMEOUT_S,
    }


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**client_options(server)) as client:
        yield client


def check_call(function: Any, names: Sequence[str]) -> None:
    assert function.name in names
    check_place(json.loads(function.arguments))


def test_openai_completes(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=FRANCE, logprobs=2, echo=True, **GREEDY)
    (choice,) = whole.choices
    assert choice.text.startswith(FRANCE)
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert len(choice.logprobs.tokens) == whole.usage.total_tokens
    assert choice.logprobs.token_logprobs[0] is None  # nothing is before it
    assert all(each <= 0 for each in choice.logprobs.token_logprobs[1:])

    stream = client.completions.create(
        prompt=FRANCE, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = stream
    assert FRANCE + "".join(each.choices[0].text for each in chunks) == choice.text
    assert last.usage == whole.usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )


def test_openai_chats(client: openai.OpenAI) -> None:
    fields = GREEDY | {"temperature": 1.0, "seed": 5, "n": 2}
    whole = client.chat.completions.create(
        messages=QUESTION, logprobs=True, top_logprobs=2, **fields
    )
    texts = [each.message.content for each in whole.choices]
    assert len(set(texts)) == 2
    for each in whole.choices:
        assert each.logprobs is not None
        assert each.logprobs.content is not None
        assert [len(entry.top_logprobs) for entry in each.logprobs.content] == [2] * 8

    streamed = ["", ""]
    usages = []
    for chunk in client.chat.completions.create(
        messages=QUESTION, stream=True, stream_options={"include_usage": True}, **fields
    ):
        usages.append(chunk.usage)
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert [each for each in usages if each is not None] == [usages[-1]]
    assert usages[-1].completion_tokens == 16


@pytest.mark.parametrize(
    ("choice", "names"), [("required", ("look", "travel")), (NAMED, ("travel",))]
)
def test_openai_must_call_a_tool(client: openai.OpenAI, choice: Any, names: Sequence[str]) -> None:
    fields = CALLING | {"tool_choice": choice, "parallel_tool_calls": False}
    (whole,) = client.chat.completions.create(**fields).choices
    (call,) = whole.message.tool_calls or ()
    check_call(call.function, names)
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds
    (again,) = streamed.message.tool_calls or ()
    assert (again.function.name, again.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )


def test_openai_reads_an_answer_by_its_schema(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 60, "seed": 3}
    parsed = (
        client.chat.completions.parse(response_format=Place, **fields).choices[0].message.parsed
    )
    assert isinstance(parsed, Place)
    with client.chat.completions.stream(response_format=Place, **fields) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_the_async_client_does_it_all_at_once(server: Server, client: openai.OpenAI) -> None:
    alone = client.completions.create(prompt=FRANCE, **GREEDY).choices[0].text

    async def ask_all() -> tuple[list[str], Any, Any]:
        async with openai.AsyncOpenAI(**client_options(server)) as many:

            async def stream() -> str:
                chunks = await many.completions.create(prompt=FRANCE, stream=True, **GREEDY)
                return "".join([each.choices[0].text async for each in chunks])

            *texts, called, parsed = await asyncio.gather(
                *(stream() for _ in range(8)),
                many.chat.completions.create(tool_choice=NAMED, **CALLING),
                many.chat.completions.parse(
                    model=MODEL, messages=QUESTION, max_tokens=60, response_format=Place
                ),
            )
            return texts, called, parsed

    texts, called, parsed = asyncio.run(ask_all())
    assert texts == [alone] * 8
    check_call(called.choices[0].message.tool_calls[0].function, ("travel",))
    assert isinstance(parsed.choices[0].message.parsed, Place)


class WithKey(grpc.StreamStreamClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds the API key to what knows nothing of keys."""

    def __init__(self, key: str) -> None:
        self._metadata = bearer(key)

    def intercept_stream_stream(self, proceed: Any, details: Any, requests: Any) -> Any:
        return proceed(self._with_key(details), requests)

    def intercept_unary_stream(self, proceed: Any, details: Any, request: Any) -> Any:
        return proceed(self._with_key(details), request)

    def _with_key(self, details: Any) -> Any:
        return details._replace(metadata=self._metadata, timeout=TIMEOUT_S)


def test_a_reflection_client_needs_nothing_of_ours(server: Server) -> None:
    with grpc.insecure_channel(server.address) as plain:
        channel = grpc.intercept_channel(plain, WithKey(server.api_key))
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"lockstep.v1.Inference", "grpc.health.v1.Health"} <= set(database.get_services())

        service = DescriptorPool(database).FindServiceByName("lockstep.v1.Inference")
        method = service.methods_by_name["Generate"]
        generate = channel.unary_stream(
            f"/{service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        params = {"max_tokens": 8, "temperature": 0}
        request = GetMessageClass(method.input_type)(text=FRANCE, sampling_params=params)
        *_, last = responses = list(generate(request))
    assert sum(len(each.token_ids) for each in responses) == 8
    reasons = method.output_type.fields_by_name["finish_reason"].enum_type
    assert reasons.values_by_number[last.finish_reason].name == "FINISH_REASON_LENGTH"


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl isn't installed")


@needs_curl
def test_curl_at_the_grpc_port_shows_where_http_is(server: Server) -> None:
    http_port = server.http_address.rpartition(":")[2]
    body = json.dumps({"prompt": FRANCE} | GREEDY)
    for more in ([], ["--json", body]):
        command = ["curl", "--silent", "--show-error", "--max-time", str(TIMEOUT_S), *more]
        shown = subprocess.run(
            [*command, f"http://{server.address}/v1/completions"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        assert json.loads(shown)["error"]["message"] == (
            f"this is the gRPC port; HTTP is served on port {http_port}"
        )


@needs_curl
def test_curl_shows_a_stream_as_it_comes(server: Server) -> None:
    body = {"prompt": FRANCE, "stream": True, "ignore_eos": True} | GREEDY | {"max_tokens": 48}
    command = [
        *(
            "curl",
            "--no-buffer",
            "--silent",
            "--show-error",
            "--fail",
            "--max-time",
            str(TIMEOUT_S),
        ),
        *("--header", f"Authorization: Bearer {server.api_key}"),
        *("--json", json.dumps(body), f"{server.http_address}/v1/completions"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as curl:
        assert curl.stdout is not None
        first = curl.stdout.readline()
        assert curl.poll() is None, "nothing was shown before the end"
        rest = curl.stdout.read()
    assert curl.returncode == 0
    *events, done, end = (first + rest).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(each.removeprefix("data: ")) for each in events]
    assert len(chunks) > 10
    reasons = [each["choices"][0]["finish_reason"] for each in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
