"""Refusals over HTTP: statuses and bodies as OpenAI's clients know them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.errors import CapacityError
from runtime.frontend.generator import Limits
from runtime.frontend.request_slots import RequestSlots
from tests.openai import (
    CHAT,
    COMPLETIONS,
    RunningApp,
    SayingEngine,
    chat_body,
    complete,
    good,
    http_client,
    refused,
    write_model,
)

pytestmark = pytest.mark.wire

LIMITS = Limits(max_prompt_tokens=50, max_n=3, max_logprobs=5)
PATHS = (COMPLETIONS, CHAT, "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[RunningApp]:
    with RunningApp(SayingEngine(folder), folder, limits=LIMITS, max_prompt_bytes=1000) as app:
        yield app


@pytest.fixture(scope="module")
def client(app: RunningApp) -> Iterator[httpx2.Client]:
    with http_client(app) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is no JSON: EOF while parsing a value"),
        (b"{", "the body is no JSON: EOF while parsing an object"),
        (b"\xff\xfe", "the body is no JSON: expected value"),
        (b'{"model": NaN}', "the body is no JSON: expected value"),
        (b'{"model": "\\ud800"}', "the body is no JSON: unexpected end of hex escape"),
        (b"[" * 100_000, "the body is no JSON: recursion limit exceeded"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "the body is no JSON: number out of range"),
        (b"[]", "the body is a list of 0 entries: must be a JSON object"),
        (b'"text"', "the body is 'text': must be a JSON object"),
        (b"null", "the body is null: must be a JSON object"),
        (b'{"model": 3}', "model=3 must be a text"),
    ],
)
def test_a_body_that_is_no_object_is_refused(
    client: httpx2.Client, path: str, body: bytes, message: str
) -> None:
    error = refused(client.post(path, content=body))
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", "temperature='hot' must be a number"),
        ({"temperature": -1}, "temperature", "temperature=-1.0 must be 0 (greedy) or in"),
        ({"top_p": 0}, "top_p", "top_p=0.0 must be in [1e-09, 1]"),
        ({"n": 4}, "n", "n=4 is more than this server's max_n=3"),
        ({"n": 0}, "n", "n=0 must be in [1, 128]"),
        ({"logprobs": 6}, "logprobs", "logprobs=6 is more than this server's max_logprobs=5"),
        ({"logprobs": True}, "logprobs", "logprobs=true must be an integer"),
        ({"best_of": 2}, "best_of", "best_of=2 must be n=1, or unset"),
        ({"prompt": [3] * 51}, "prompt", "prompt tokens=51 is more than this server's"),
        ({"prompt": "a" * 1001}, "prompt", "prompt of 1001 bytes is longer than max_prompt_bytes"),
        ({"stop": ["a", 3]}, "stop[1]", "stop[1]=3 must be a text"),
        ({"stop": ["a"] * 17}, "stop", "stop has 17 entries: must be at most 16"),
        ({"stop": [""]}, "stop[0]", "stop[0] is empty: it must have a character"),
        ({"stop": "a" * 1025}, "stop[0]", "stop[0] has 1025 characters: must be at most 1024"),
        ({"seed": -(2**63) - 1}, "seed", "seed=-9223372036854775809 must be in [-2**63, 2**64)"),
        ({"seed": 2**64}, "seed", "seed=18446744073709551616 must be in [0, 2**64)"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias has the key 'a': must be a token id"),
        ({"logit_bias": {"7": "x"}}, "logit_bias.7", "logit_bias.7='x' must be a number"),
        ({"logit_bias": {"7": 101}}, "logit_bias[7]", "logit_bias[7]=101.0 must be in [-100, 100]"),
        ({"logit_bias": {"600": 1}}, "logit_bias", "logit_bias token id 600 must be in [0, 600)"),
        ({"suffix": "end"}, "suffix", "suffix='end' can't be served: leave it out"),
        ({"priority": 11}, "priority", "priority=11 must be in [-10, 10]"),
        ({"cache_salt": "a" * 257}, "cache_salt", "cache_salt of 257 bytes is longer than 256"),
        ({"request_id": "a\nb"}, "request_id", "request_id of 3 characters must be printable"),
        ({"request_id": ""}, "request_id", "request_id of 0 characters must be printable"),
        ({"regex": "a", "choices": ["b"]}, "regex", "regex and choices are set: at most one"),
        ({"json_schema": 3}, "json_schema", "json_schema is 3: must be a JSON schema, an object"),
        ({"x" * 200: 1}, None, "x" * 80 + " isn't known here: leave it out"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    client: httpx2.Client, fields: dict[str, Any], param: str | None, message: str
) -> None:
    body = {"model": "tiny", "prompt": "two words"} | fields
    error = refused(client.post(COMPLETIONS, json=body))
    assert error["message"].startswith(message)
    assert error["param"] == param
    assert len(error["message"]) < 300


def test_infinity_is_no_number(client: httpx2.Client) -> None:
    content = b'{"model": "tiny", "prompt": "a", "temperature": 1e999}'
    error = refused(client.post(COMPLETIONS, content=content))
    assert error["message"] == "temperature=inf must be a finite number"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_another_model_isnt_found(client: httpx2.Client, path: str) -> None:
    body = {"prompt": "a"} if path == COMPLETIONS else chat_body()
    error = refused(client.post(path, json=body | {"model": "gpt"}), 404)
    assert error == {
        "message": "model='gpt' isn't served here: must be 'tiny'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_the_model_must_be_named(client: httpx2.Client) -> None:
    error = refused(client.post(COMPLETIONS, json={"prompt": "a"}))
    assert error["message"] == "model is missing: the request must have it"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/responses", "/v1/responses isn't served: use /v1/chat/completions"),
        ("/v1/responses/resp_1", "/v1/responses/resp_1 isn't served: use /v1/chat/completions"),
        ("/v1/embeddings", "/v1/embeddings isn't served: this server generates text alone"),
        ("/v1/audio/speech", "/v1/audio/speech isn't served: this server generates text alone"),
        ("/v1/batches", "/v1/batches isn't served: use the command `lockstep batch"),
        ("/completions", "/completions isn't served: use /v1/completions"),
        ("/v2/completions", "'/v2/completions' is no address of this server"),
    ],
)
def test_addresses_that_arent_served_are_refused_by_name(
    client: httpx2.Client, path: str, message: str
) -> None:
    for response in (client.post(path, json={}), client.get(path)):
        assert refused(response, 404)["message"].startswith(message)


def test_another_method_is_refused(client: httpx2.Client) -> None:
    response = client.get(COMPLETIONS)
    assert refused(response, 405) == {
        "message": "GET can't be used at /v1/completions",
        "type": "invalid_request_error",
        "param": None,
        "code": "method_not_allowed",
    }
    assert response.headers["allow"] == "POST"


def test_while_nothing_is_taken_requests_are_sent_elsewhere(folder: Path) -> None:
    reasons: list[str] = ["the server is stopping"]
    why = lambda: reasons[0] if reasons else None  # noqa: E731
    engine = SayingEngine(folder)
    with RunningApp(engine, folder, why_refused=why) as app, http_client(app) as client:
        body = {"model": "tiny", "prompt": "a"}
        for response in (client.post(COMPLETIONS, json=body), client.get("/ready")):
            error = refused(response, 503)
            assert (error["message"], error["code"]) == ("the server is stopping", "unavailable")
            assert response.headers["retry-after"] == "1"
            assert response.headers["connection"] == "close"
        assert good(client.get("/health")) == {"status": "ok"}
        assert app.metrics.ended.get_nowait() == (COMPLETIONS, "unavailable")
        reasons.clear()
        assert good(client.get("/ready")) == {"status": "ready"}
        assert complete(client)


def test_a_lost_engine_is_503(folder: Path) -> None:
    with RunningApp(SayingEngine(folder), folder) as app, http_client(app) as client:
        app.call(app.pool.close)
        error = refused(client.post(COMPLETIONS, json={"model": "tiny", "prompt": "a"}), 503)
    assert error["type"] == "service_unavailable_error"


def test_too_many_requests_of_a_key_are_429(folder: Path) -> None:
    slots = RequestSlots(1)
    engine = SayingEngine(folder)
    with RunningApp(engine, folder, take_slot=slots.take) as app, http_client(app) as client:
        with slots.take("default"):
            response = client.post(COMPLETIONS, json={"model": "tiny", "prompt": "a"})
            assert refused(response, 429)["code"] == "rate_limit_exceeded"
            assert response.headers["retry-after"] == "1"
        assert complete(client)


def test_a_bug_is_told_without_its_details(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    @contextlib.contextmanager
    def broken(tenant: str) -> Iterator[None]:
        raise ZeroDivisionError("secret")
        yield

    engine = SayingEngine(folder)
    with RunningApp(engine, folder, take_slot=broken) as app, http_client(app) as client:
        response = client.post(COMPLETIONS, json={"model": "tiny", "prompt": "a"})
        error = refused(response, 500)
        assert app.metrics.ended.get_nowait() == (COMPLETIONS, "internal")
    assert error["message"] == "the server failed; its log says why"
    assert "secret" in caplog.text


def test_a_retry_is_never_wanted_sooner_than_in_a_second(folder: Path) -> None:
    engine = SayingEngine(folder)
    engine.fails_after = 0
    engine.failure = CapacityError("full", retry_after_s=0.01)
    with RunningApp(engine, folder) as app, http_client(app) as client:
        response = client.post(COMPLETIONS, json={"model": "tiny", "prompt": "a"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    (
        *("prompt", "max_tokens", "echo", "logprobs", "n", "stop", "seed", "stream", "tools"),
        *("logit_bias", "messages", "tool_choice", "response_format", "stream_options", "tokens"),
        *("chat_template_kwargs", "json_schema", "temperature", "cache_salt", "request_id"),
        *("stop_token_ids", "allowed_token_ids", "bad_words", "priority", "top_logprobs"),
    )
)


BODIES = st.tuples(st.sampled_from(PATHS), st.dictionaries(FIELDS, JSON, max_size=3))
OPTIONS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


def check_any_body(client: httpx2.Client, path: str, fields: dict[str, Any]) -> None:
    base = {"model": "tiny", "prompt": "a", "max_tokens": 2}
    if path == CHAT:
        base = chat_body(max_tokens=2)
    if path == "/detokenize":
        base = {"tokens": [3]}
    response = client.post(path, content=json.dumps(base | fields).encode())
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        assert refused(response, response.status_code)["message"]


@settings(max_examples=80, **OPTIONS)
@given(body=BODIES)
def test_no_body_makes_the_server_fail(
    client: httpx2.Client, body: tuple[str, dict[str, Any]]
) -> None:
    check_any_body(client, *body)


@pytest.mark.full
@pytest.mark.timeout(400)
@settings(max_examples=1500, **OPTIONS)
@given(body=BODIES)
def test_no_body_of_many_makes_the_server_fail(
    client: httpx2.Client, body: tuple[str, dict[str, Any]]
) -> None:
    check_any_body(client, *body)
