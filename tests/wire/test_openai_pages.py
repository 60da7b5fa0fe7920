"""What is asked for without generating: models, tokens, health, metrics, and the document."""

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx2
import pydantic
import pytest

from runtime.frontend.openai import answers
from runtime.frontend.openai.app import OPEN_PATHS
from tests.openai import (
    CHAT,
    COMPLETIONS,
    CREATED,
    HERMES_TEMPLATE,
    TOOL,
    RunningApp,
    SayingEngine,
    chat,
    chat_body,
    complete,
    events,
    good,
    http_client,
    refused,
    write_model,
)

pytestmark = pytest.mark.wire

PAGE = b"<!doctype html><title>status</title>"


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    pages = {"/": ("text/html; charset=utf-8", PAGE)}
    with RunningApp(SayingEngine(folder), folder, template=HERMES_TEMPLATE, pages=pages) as app:
        yield app


@pytest.fixture
def engine(app: RunningApp) -> SayingEngine:
    engine: SayingEngine = app.engine
    return engine


@pytest.fixture
def client(app: RunningApp) -> Iterator[httpx2.Client]:
    with http_client(app) as client:
        yield client


@pytest.fixture(scope="module")
def document(app: RunningApp) -> dict[str, Any]:
    with http_client(app) as client:
        return good(client.get("/openapi.json"))


def test_the_model_is_told(client: httpx2.Client) -> None:
    model = {
        "id": "tiny",
        "object": "model",
        "created": CREATED,
        "owned_by": "lockstep",
        "max_model_len": 4096,
    }
    assert good(client.get("/v1/models")) == {"object": "list", "data": [model]}
    assert good(client.get("/v1/models/tiny")) == model
    for name in ("other", "a/b", "tiny/x"):
        error = refused(client.get(f"/v1/models/{name}"), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_a_model_whose_name_is_a_path_is_found(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    with (
        RunningApp(SayingEngine(folder, name="org/tiny"), folder) as app,
        http_client(app) as client,
    ):
        assert good(client.get("/v1/models/org/tiny"))["id"] == "org/tiny"


def test_texts_become_tokens_and_texts_again(client: httpx2.Client, engine: SayingEngine) -> None:
    tokens = engine.tokens_of("the é fox")
    answer = good(client.post("/tokenize", json={"prompt": "the é fox", "return_token_strs": True}))
    assert answer.pop("token_strs")[-1].endswith("x")
    assert answer == {"count": len(tokens), "max_model_len": 4096, "tokens": tokens}
    body = {"model": "tiny", "tokens": [*tokens, 1]}
    assert good(client.post("/detokenize", json=body)) == {"prompt": "the é fox</s>"}


def test_chats_become_the_tokens_that_are_generated_from(
    client: httpx2.Client, engine: SayingEngine
) -> None:
    body = chat_body(tools=[TOOL])
    answer = good(client.post("/tokenize", json=body))
    chat(client, tools=[TOOL])
    assert answer["tokens"] == [*engine.requests[-1].prompt_token_ids]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "prompt or messages must be set, and not both"),
        ("/tokenize", {"prompt": 3}, "prompt=3 must be a text"),
        ("/tokenize", chat_body(prompt="a"), "prompt or messages must be set, and not both"),
        ("/tokenize", chat_body(add_special_tokens=True), "add_special_tokens=true is set with"),
        ("/tokenize", {"prompt": "a" * (1 << 21)}, "prompt of 2097152 bytes is longer than"),
        ("/detokenize", {}, "tokens is missing: the request must have it"),
        ("/detokenize", {"tokens": "a"}, "tokens='a' must be a list"),
        ("/detokenize", {"tokens": [5, "a"]}, "tokens[1]='a' must be in [0, 600), the vocabulary"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]=true must be in [0, 600), the vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]=-1 must be in [0, 600), the vocabulary"),
        ("/detokenize", {"tokens": [600]}, "tokens[0]=600 must be in [0, 600), the vocabulary"),
        ("/detokenize", {"tokens": [3] * 4097}, "tokens has 4097 entries: more than max_model_len"),
    ],
)
def test_what_has_no_tokens_is_refused(
    client: httpx2.Client, path: str, body: dict[str, Any], message: str
) -> None:
    assert refused(client.post(path, json=body))["message"].startswith(message)


def test_tokens_of_another_model_arent_told(client: httpx2.Client) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [3]})):
        error = refused(client.post(path, json=body | {"model": "gpt"}), 404)
        assert error["code"] == "model_not_found"


def test_no_text_and_no_tokens_are_nothing(client: httpx2.Client) -> None:
    assert good(client.post("/tokenize", json={"prompt": ""}))["tokens"] == []
    assert good(client.post("/detokenize", json={"tokens": []})) == {"prompt": ""}


def test_a_scrape_tells_requests_and_engines(client: httpx2.Client) -> None:
    complete(client)
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    line = 'lockstep_requests_total{endpoint="/v1/completions",status="ok"}'
    assert re.search(re.escape(line) + r" [1-9]", response.text)
    assert "lockstep_num_requests_running" in response.text


def test_stats_are_told_as_json(client: httpx2.Client, app: RunningApp) -> None:
    content = good(client.get("/stats"))
    assert content["model"]["name"] == "tiny"
    (stats,) = content["engines"].values()
    assert stats["num_running"] == app.engine.stats().num_running


def test_pages_are_served_and_ask_nobody_else(client: httpx2.Client) -> None:
    page = client.get("/")
    assert page.content == PAGE
    docs = client.get("/docs")
    assert docs.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"(src|href|url)\W{1,3}(https?:)?//", docs.text)
    for response in (page, docs):
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; connect-src 'self'")


def test_the_document_has_every_address(document: dict[str, Any]) -> None:
    assert document["info"]["version"] == version("lockstep-serving")
    assert document["paths"].keys() == {
        *(COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/models", "/v1/models/{model}"),
        *("/stats", "/metrics", "/health", "/ready"),
    }
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["description"]
            assert ("security" in operation) == (path not in OPEN_PATHS)


def test_the_document_describes_bodies_answers_and_errors(document: dict[str, Any]) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        operation = document["paths"][path]["post"]
        content = operation["requestBody"]["content"]["application/json"]
        assert content["schema"]["properties"]
        assert "$ref" not in str(content["schema"])
        statuses = {"200", "400", "401", "404", "405", "408", "413", "429", "500", "503"}
        assert operation["responses"].keys() == statuses
        for response in operation["responses"].values():
            assert response["content"]["application/json"]["schema"]
    chat_fields = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]
    assert {"messages", "tools", "temperature", "regex"} <= chat_fields["schema"][
        "properties"
    ].keys()
    assert chat_fields["schema"]["required"] == ["model", "messages"]


def test_examples_of_the_document_are_answered(
    client: httpx2.Client, document: dict[str, Any]
) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        good(client.post(path, json=body["example"]))


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({}, answers.ChatCompletion), ({"logprobs": True, "n": 2}, answers.ChatCompletion)],
)
def test_answers_of_chats_are_as_described(
    client: httpx2.Client, engine: SayingEngine, fields: dict[str, Any], kind: Any
) -> None:
    engine.texts = ['a <tool_call>{"name": "look", "arguments": {}}</tool_call>']
    for more in (fields, {**fields, "tools": [TOOL]}):
        check(kind, chat(client, **more))
        for chunk in events(client, CHAT, chat_body(**more)):
            check(answers.ChatChunk, chunk)


def test_answers_of_completions_are_as_described(client: httpx2.Client) -> None:
    for fields in ({}, {"logprobs": 2, "echo": True, "n": 2}, {"prompt_logprobs": 1}):
        check(answers.Completion, complete(client, **fields))
    body = {"model": "tiny", "prompt": "a", "stream_options": {"include_usage": True}}
    for chunk in events(client, COMPLETIONS, body):
        check(answers.Completion, chunk)


def check(kind: Any, content: dict[str, Any]) -> None:
    """Raises where the answer has what its type hasn't, or lacks something."""
    adapter = pydantic.TypeAdapter(kind)
    assert adapter.dump_python(adapter.validate_python(content, strict=True)) == content


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_probes_may_ask_for_the_head_alone(client: httpx2.Client, path: str) -> None:
    response = client.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert "head" not in good(client.get("/openapi.json"))["paths"][path]


@pytest.mark.parametrize("path", ["/health/", "/v1/completions/", "/v1/models/tiny/"])
def test_nobody_is_sent_to_another_address(client: httpx2.Client, path: str) -> None:
    response = client.get(path, headers={"host": "evil.example.org"})
    assert response.status_code == 404
    assert "location" not in response.headers
