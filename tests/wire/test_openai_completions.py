"""/v1/completions over an engine that says what the test wants."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.openai import (
    COMPLETIONS,
    CREATED,
    RunningApp,
    SayingEngine,
    complete,
    events,
    http_client,
    logprobs_of,
    refused,
    write_model,
)

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = write_model(tmp_path_factory.mktemp("model"))
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


def ask(client: httpx2.Client, prompt: object = "two words", **fields: Any) -> httpx2.Response:
    return client.post(COMPLETIONS, json={"model": "tiny", "prompt": prompt} | fields)


def test_a_whole_answer_has_openais_shape(client: httpx2.Client, engine: SayingEngine) -> None:
    answer = complete(client, request_id="mine", max_tokens=100)
    num_prompt, num_output = (len(engine.tokens_of(text)) for text in ("two words", "the fox"))
    assert answer == {
        "id": "cmpl-mine",
        "object": "text_completion",
        "created": CREATED,
        "model": "tiny",
        "system_fingerprint": "f" * 32,
        "choices": [{"index": 0, "text": "the fox", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output + 1,  # with the token that ended it
            "total_tokens": num_prompt + num_output + 1,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_chunks_put_together_are_the_whole_answer(client: httpx2.Client) -> None:
    body = {"model": "tiny", "prompt": "two words", "max_tokens": 100, "request_id": "mine"}
    chunks = events(client, COMPLETIONS, body)
    assert "".join(each["choices"][0]["text"] for each in chunks) == "the fox"
    reasons = [each["choices"][0]["finish_reason"] for each in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert {(each["id"], each["object"], each["created"]) for each in chunks} == {
        ("cmpl-mine", "text_completion", CREATED)
    }
    assert not any("usage" in each for each in chunks)


@pytest.mark.parametrize("is_stream", [False, True])
def test_length_is_told_exactly_when_the_cap_was_hit(
    client: httpx2.Client, engine: SayingEngine, is_stream: bool
) -> None:
    count = len(engine.tokens_of("the fox"))
    reasons = []
    for max_tokens in (1, count - 1, count, count + 1):
        body = {"model": "tiny", "prompt": "two", "max_tokens": max_tokens}
        if is_stream:
            *_, last = events(client, COMPLETIONS, body)
        else:
            last = complete(client, "two", max_tokens=max_tokens)
            assert last["usage"]["completion_tokens"] == max_tokens
        reasons.append(last["choices"][0]["finish_reason"])
    assert reasons == ["length", "length", "length", "stop"]


def test_max_tokens_is_16_where_it_is_null_or_unset(
    client: httpx2.Client, engine: SayingEngine
) -> None:
    engine.texts = ["x" * 100]
    assert complete(client)["usage"]["completion_tokens"] == 16
    assert complete(client, max_tokens=None)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is an empty text: it must have at least 1 character"),
        ([], "prompt is an empty list: it must have at least 1 entry"),
        ([""], "prompt[0] is an empty text: it must have at least 1 character"),
        (["a", ""], "prompt[1] is an empty text: it must have at least 1 character"),
        ([[]], "prompt[0] is an empty list: it must have at least 1 token"),
        ([[3], []], "prompt[1] is an empty list: it must have at least 1 token"),
        (None, "prompt is null: must be a text, token ids, or a list of one of them"),
        (3, "prompt is 3: must be a text, token ids, or a list of one of them"),
        ({"a": 1}, "prompt is an object of 1 entries: must be a text, token ids, or a list"),
        ([True], "prompt[0] is true: must be a text or token ids"),
        ([1.5], "prompt[0] is 1.5: must be a text or token ids"),
        ([3, "a"], "prompt has 'a' at place 1: must be a token id"),
        ([3, True], "prompt has true at place 1: must be a token id"),
        (["a", [3]], "prompt[1] is a list of 1 entries: must be as prompt[0], which is 'a'"),
        ([-1], "prompt token id -1 must be in [0, 600), the vocabulary"),
        ([600], "prompt token id 600 must be in [0, 600), the vocabulary"),
        ([10**30], "prompt token id 1000000000000000000000000000000 must be in [0, 600)"),
        ([3] * 4097, "prompt of 4097 tokens is more than max_model_len=4096"),
        ([3] * 4096, "prompt of 4096 tokens + at least 1 new is 4097 tokens: more than"),
        (["a"] * 257, "prompt has 257 entries: must be at most 256"),
    ],
)
def test_a_wrong_prompt_is_refused_by_name(
    client: httpx2.Client, prompt: object, message: str
) -> None:
    error = refused(ask(client, prompt))
    assert error["message"].startswith(message)
    assert error["type"] == "invalid_request_error"
    assert error["param"] in ("prompt", "prompt[0]", "prompt[1]")


def test_a_missing_prompt_is_refused(client: httpx2.Client) -> None:
    error = refused(client.post(COMPLETIONS, json={"model": "tiny"}))
    assert (error["param"], error["message"]) == (
        "prompt",
        "prompt is missing: the request must have it",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1, unless echo=true"),
        ({"max_tokens": -1}, "max_tokens=-1 must be at least 1 and at most"),
        ({"max_tokens": 4096}, "prompt of 2 tokens + max_tokens=4096 is 4098 tokens: more than"),
        ({"max_tokens": 10**12}, "max_tokens=1000000000000 must be at least 1 and at most"),
        ({"max_tokens": 2.0}, "max_tokens=2.0 must be an integer"),
        ({"max_tokens": "2"}, "max_tokens='2' must be an integer"),
        ({"max_tokens": True}, "max_tokens=true must be an integer"),
    ],
)
def test_a_wrong_max_tokens_is_refused(
    client: httpx2.Client, fields: dict[str, Any], message: str
) -> None:
    assert refused(ask(client, [5, 6], **fields))["message"].startswith(message)


def test_several_prompts_are_answered_in_their_order(
    client: httpx2.Client, engine: SayingEngine
) -> None:
    engine.texts = ["first", "second"]
    answer = complete(client, [[5], [6, 7], [8, 9, 10]], n=2, max_tokens=50)
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [
        (place, text) for place, text in enumerate(["first", "second"] * 3)
    ]
    assert answer["usage"]["prompt_tokens"] == 6
    counts = [len(engine.tokens_of(text)) + 1 for text in engine.texts]
    assert answer["usage"]["completion_tokens"] == 3 * sum(counts)
    assert sorted(len(each.prompt_token_ids) for each in engine.requests) == [1, 2, 3]


def test_several_prompts_stream_at_once(client: httpx2.Client, engine: SayingEngine) -> None:
    engine.texts = ["first", "second"]
    body = {"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 50}
    texts = dict.fromkeys(range(4), "")
    ended = []
    for chunk in events(client, COMPLETIONS, body):
        (choice,) = chunk["choices"]
        assert choice["index"] not in ended
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            ended.append(choice["index"])
    assert [texts[index] for index in range(4)] == ["first", "second"] * 2
    assert sorted(ended) == [0, 1, 2, 3]


def test_logprobs_have_the_old_shape(client: httpx2.Client, engine: SayingEngine) -> None:
    engine.texts = ["the é!"]  # the tokenizer has tokens for the bytes of é alone
    answer = complete(client, logprobs=2, max_tokens=50)
    shape = answer["choices"][0]["logprobs"]
    tokens = [*engine.tokens_of("the é!"), 1]
    assert shape.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert shape["tokens"][-4:] == ["bytes:\\xc3", "bytes:\\xa9", "!", "</s>"]
    assert shape["token_logprobs"] == [-token / 8 for token in tokens]
    assert shape["text_offset"][-4:] == [4, 4, 5, 6]
    for token, name, tops in zip(tokens, shape["tokens"], shape["top_logprobs"], strict=True):
        assert max(tops, key=tops.__getitem__) == name
        assert list(tops.values()) == list(logprobs_of(token, 2).top_logprobs)


def test_no_most_probable_tokens_still_tell_the_one_that_is_there(client: httpx2.Client) -> None:
    shape = complete(client, logprobs=0)["choices"][0]["logprobs"]
    assert [len(each) for each in shape["top_logprobs"]] == [1] * len(shape["tokens"])


def test_logprobs_of_chunks_are_those_of_the_whole_answer(client: httpx2.Client) -> None:
    body = {"model": "tiny", "prompt": "two words", "logprobs": 1, "max_tokens": 50, "echo": True}
    whole = complete(client, **body)["choices"][0]
    chunks = [each["choices"][0] for each in events(client, COMPLETIONS, body)]
    for name, entries in whole["logprobs"].items():
        assert [entry for each in chunks for entry in each["logprobs"][name]] == entries
    assert "".join(each["text"] for each in chunks) == whole["text"] == "two wordsthe fox"


def test_echo_begins_each_choice_with_its_prompt(
    client: httpx2.Client, engine: SayingEngine
) -> None:
    engine.texts = [" one", " two"]
    ids = engine.tokens_of("dog")
    answer = complete(client, ["fox", "two words"], echo=True, n=2, max_tokens=50, logprobs=1)
    assert [each["text"] for each in answer["choices"]] == [
        *("fox one", "fox two", "two words one", "two words two"),
    ]
    for choice in answer["choices"]:
        shape = choice["logprobs"]
        assert shape["token_logprobs"][0] is shape["top_logprobs"][0] is None
        assert "".join(shape["tokens"]) == choice["text"] + "</s>"
        assert shape["text_offset"][0] == 0
        assert shape["text_offset"][-1] == len(choice["text"])
    assert complete(client, ids, echo=True)["choices"][0]["text"] == "dog one"


@pytest.mark.parametrize("is_stream", [False, True])
def test_with_echo_no_tokens_may_be_wanted(client: httpx2.Client, is_stream: bool) -> None:
    body = {"model": "tiny", "prompt": "two words", "echo": True, "max_tokens": 0, "logprobs": 1}
    if is_stream:
        body["stream_options"] = {"include_usage": True}
        (chunk, answer) = events(client, COMPLETIONS, body)
        choice = chunk["choices"][0]
    else:
        answer = complete(client, **body)
        (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("two words", "length")
    assert "".join(choice["logprobs"]["tokens"]) == "two words"
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]


def test_what_is_sampled_reaches_the_engine(client: httpx2.Client, engine: SayingEngine) -> None:
    complete(
        client,
        temperature=0.5,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        seed=-1,
        n=2,
        best_of=2,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={"7": -100, "8": 2.5},
        stop="never",
        stop_token_ids=[9],
        min_tokens=2,
        max_tokens=9,
        bad_words=["dog"],
        allowed_token_ids=[5, 6, 7, 8],
        ignore_eos=True,
        cache_salt="salt",
        priority=-2,
        prompt_logprobs=1,
        user="somebody",
        metadata={"a": "b"},
        suffix=None,
    )
    (request,) = engine.requests
    params = request.params
    assert (request.seed, request.cache_salt, request.priority) == (2**64 - 1, "salt", -2)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.5, 7, 0.25)
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1.5)
    assert (params.repetition_penalty, params.min_tokens, params.max_tokens) == (1.25, 2, 9)
    assert params.logit_bias == {7: -100, 8: 2.5}
    assert (params.stop, params.stop_token_ids) == (("never",), (9,))
    assert (params.allowed_token_ids, params.ignore_eos) == ((5, 6, 7, 8), True)
    assert (params.n, params.prompt_logprobs, request.tenant) == (2, 1, "default")
    assert request.bad_words


def test_a_stop_string_ends_the_text(client: httpx2.Client) -> None:
    for stop in (" f", [" f", "z"]):
        (choice,) = complete(client, stop=stop, max_tokens=50)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("the", "stop")


def test_scores_of_the_prompt_are_told_by_token_id(
    client: httpx2.Client, engine: SayingEngine
) -> None:
    (choice,) = complete(client, "two words", prompt_logprobs=1)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, entry in zip(engine.tokens_of("two words")[1:], others, strict=True):
        assert entry[str(token)]["logprob"] == -token / 8


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "a+"},
        {"grammar": 'start: "a"'},
        {"choices": ["a", "b"]},
        {"json_schema": '{"type": "object"}'},
        {"json_schema": {"type": "object"}},
    ],
)
def test_a_form_of_the_output_reaches_the_engine(
    client: httpx2.Client, engine: SayingEngine, fields: dict[str, Any]
) -> None:
    complete(client, **fields)
    (kind, wanted), *_ = fields.items()
    structure = engine.requests[0].params.structure
    assert structure is not None
    assert structure.kind == kind
    assert structure.text == {"a+": "a+"}.get(str(wanted), structure.text)
    if kind == "json_schema":
        assert structure.text == '{"type": "object"}'
