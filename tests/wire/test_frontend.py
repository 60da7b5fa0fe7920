"""A frontend over a fake engine: real gRPC on both sides of it."""

from pathlib import Path

import grpc
import pytest

from protos import common_pb2, inference_pb2
from protos.auth import bearer
from runtime.engine_service import EngineServer
from runtime.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    LockstepError,
    WorkerError,
)
from runtime.frontend.text import REPLACEMENT, Tokenizer
from runtime.request import FinishReason, RequestFailure, RequestOutput
from tests.frontend import (
    API_KEY,
    LINES,
    MAX_MODEL_LEN,
    TIMEOUT_S,
    VOCAB_SIZE,
    Client,
    EchoEngine,
    FakeEngine,
    RunningFrontend,
    make_byte_fallback_tokenizer,
    make_model,
    status_of,
)

pytestmark = pytest.mark.wire

TEXTS = [
    "The quick brown fox",
    "family 👩‍👩‍👧‍👦 and ภาษาไทย",
    "مرحبا بالعالم",
    "e\u0301 combining, two  spaces",
]


def test_concurrent_streams_get_their_own_text(folder: Path) -> None:
    engine = EchoEngine(make_model(str(folder)))
    tokenizer = Tokenizer.load(str(folder))
    server = EngineServer(engine, "engine-token")
    server.start()
    with RunningFrontend(server) as frontend, grpc.insecure_channel(frontend.address) as channel:
        client = Client(channel)
        engine.answer(num_requests=8 * len(TEXTS))
        calls = {
            f"{index}": (text, client.generate(text, request_id=f"{index}"))
            for index, text in enumerate(TEXTS * 8)
        }
        for label, (text, call) in calls.items():
            prompt = tokenizer.encode(text)
            responses = list(call)
            assert {response.request_id for response in responses} == {label}
            assert [t for response in responses for t in response.token_ids] == prompt
            whole = tokenizer.decode(prompt + prompt)[len(tokenizer.decode(prompt)) :]
            assert "".join(response.text for response in responses) == whole == text
            assert not any(REPLACEMENT in response.text for response in responses)
            *running, last = responses
            assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert last.usage == inference_pb2.Usage(
                num_prompt_tokens=len(prompt), num_output_tokens=len(prompt)
            )
            assert not any(r.finish_reason or r.HasField("usage") for r in running)
            assert [r.HasField("seed") for r in responses] == [True] + [False] * len(running)
    server.stop(grace_s=5)


def test_the_same_request_id_twice_at_once_is_fine(engine: FakeEngine, client: Client) -> None:
    calls = [client.generate(token_ids=[5], request_id="mine") for _ in range(2)]
    requests = [engine.added.get(timeout=TIMEOUT_S) for _ in calls]
    assert len({request.request_id for _, request in requests}) == 2
    for connection, request in requests:
        token = 7 + request.request_id
        connection.sink([RequestOutput(request.request_id, (token,), FinishReason.LENGTH)])
    responses = [response for call in calls for response in call]
    assert [each.request_id for each in responses] == ["mine", "mine"]
    assert {each.token_ids[0] for each in responses} == {
        7 + request.request_id for _, request in requests
    }


def test_a_message_brings_its_step_before_the_next_one(engine: FakeEngine, client: Client) -> None:
    call = client.generate("two", max_tokens=3)
    connection, request = engine.added.get(timeout=TIMEOUT_S)
    tokens = Tokenizer.load(engine.model.path).encode("two")
    for token in tokens:
        connection.sink([RequestOutput(request.request_id, (token,))])
        assert list(next(call).token_ids) == [token]
    connection.sink([RequestOutput(request.request_id, (), FinishReason.ABORT)])
    assert [response.finish_reason for response in call] == [common_pb2.FINISH_REASON_ABORT]


def test_an_incomplete_character_waits_and_is_given_at_the_end(
    engine: FakeEngine, client: Client
) -> None:
    call = client.generate("two")
    connection, request = engine.added.get(timeout=TIMEOUT_S)
    first = make_byte_fallback_tokenizer(LINES).token_to_id("<0xE0>")
    connection.sink([RequestOutput(request.request_id, (first,))])
    response = next(call)
    assert (response.text, list(response.token_ids)) == ("", [first])
    connection.sink([RequestOutput(request.request_id, (1,), FinishReason.STOP)])
    assert [response.text for response in call] == [REPLACEMENT]


def test_parameters_and_a_given_seed_reach_the_engine(engine: FakeEngine, client: Client) -> None:
    call = client.generate(
        token_ids=[5, 6], max_tokens=9, temperature=0.0, top_k=4, top_p=0.25, seed=77
    )
    connection, request = engine.added.get(timeout=TIMEOUT_S)
    assert (list(request.prompt_token_ids), request.seed) == ([5, 6], 77)
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (9, 0, 4, 0.25)
    connection.sink([RequestOutput(request.request_id, (7,), FinishReason.LENGTH)])
    (response,) = call
    assert response.seed == 77


def test_a_drawn_seed_is_told_and_differs(engine: FakeEngine, client: Client) -> None:
    seeds = []
    for _ in range(2):
        call = client.generate("two")
        connection, request = engine.added.get(timeout=TIMEOUT_S)
        connection.sink([RequestOutput(request.request_id, (7,), FinishReason.LENGTH)])
        (response,) = call
        assert response.seed == request.seed
        seeds.append(response.seed)
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("cancel", "before the first token"),
        ("cancel", "between tokens"),
        ("vanish", "before the first token"),
        ("vanish", "between tokens"),
        ("deadline", "between tokens"),
    ],
)
def test_a_client_that_leaves_is_aborted(
    engine: FakeEngine, frontend: RunningFrontend, how: str, when: str
) -> None:
    with grpc.insecure_channel(frontend.address) as channel:
        call = Client(channel).generate("two", timeout_s=2.0 if how == "deadline" else TIMEOUT_S)
        connection, request = engine.added.get(timeout=TIMEOUT_S)
        if when == "between tokens":
            connection.sink([RequestOutput(request.request_id, (7,))])
            next(call)
        if how == "cancel":
            call.cancel()
        elif how == "deadline":
            assert status_of(call)[0] == grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            channel.close()
        assert engine.aborted.get(timeout=TIMEOUT_S) == request.request_id
        connection.sink([RequestOutput(request.request_id, (8,))])  # was under way
    assert engine.aborted.empty()


def test_a_finished_request_is_not_aborted(engine: FakeEngine, client: Client) -> None:
    call = client.generate("two")
    connection, request = engine.added.get(timeout=TIMEOUT_S)
    connection.sink([RequestOutput(request.request_id, (7,), FinishReason.LENGTH)])
    list(call)
    client.call("GetStats")  # answered after everything that went before it on the stream
    assert engine.aborted.empty()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("prompt is wrong"), grpc.StatusCode.INVALID_ARGUMENT),
        (CapacityError("full", retry_after_s=1), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (DeadlineError("too late"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (WorkerError("rank 1 is gone"), grpc.StatusCode.UNAVAILABLE),
        (LockstepError("a bug"), grpc.StatusCode.INTERNAL),
    ],
)
def test_an_engine_failure_ends_its_request_alone(
    engine: FakeEngine, client: Client, error: LockstepError, code: grpc.StatusCode
) -> None:
    failing, other = client.generate("two"), client.generate("words")
    requests = [engine.added.get(timeout=TIMEOUT_S) for _ in range(2)]
    prompt = Tokenizer.load(engine.model.path).encode("two")
    for connection, request in requests:
        outcome = RequestFailure(request.request_id, error)
        if list(request.prompt_token_ids) != prompt:
            outcome = RequestOutput(request.request_id, (7,), FinishReason.LENGTH)
        connection.sink([outcome])
    assert status_of(failing) == (code, str(error))
    assert len(list(other)) == 1


BAD_REQUESTS = {
    "no prompt": ({}, "prompt is missing: set text, token_ids or chat"),
    "empty text": ({"text": ""}, "prompt is empty: it must have at least 1 character"),
    "no tokens": ({"token_ids": []}, "prompt is empty: it must have at least 1 token"),
    "negative": ({"token_ids": [5, -1]}, "prompt token id -1 must be in [0, 600)"),
    "unknown": ({"token_ids": [VOCAB_SIZE]}, "prompt token id 600 must be in [0, 600)"),
    "too long": (
        {"token_ids": [5] * MAX_MODEL_LEN, "max_tokens": 2},
        "prompt of 4096 tokens + max_tokens=2 is 4098 tokens: more than max_model_len=4096",
    ),
    "max_tokens 0": ({"text": "two", "max_tokens": 0}, "max_tokens=0 must be"),
    "max_tokens < 0": ({"text": "two", "max_tokens": -5}, "max_tokens=-5 must be"),
    "max_tokens huge": (
        {"token_ids": [5, 6], "max_tokens": 2**31 - 1},
        "prompt of 2 tokens + max_tokens=2147483647 is 2147483649 tokens: more than",
    ),
    "temperature": ({"text": "two", "temperature": -0.5}, "temperature=-0.5 must be"),
    "NaN": ({"text": "two", "temperature": float("nan")}, "temperature=nan must be"),
    "top_p": ({"text": "two", "top_p": 0.0}, "top_p=0.0 must be"),
    "top_k": ({"text": "two", "top_k": -1}, "top_k=-1 must be"),
    "n 0": ({"text": "two", "n": 0}, "n=0 must be in [1, 128]"),
    "n 129": ({"text": "two", "n": 129}, "n=129 must be in [1, 128]"),
    "min_tokens": (
        {"text": "two", "min_tokens": 17},
        "min_tokens=17 must be at least 0 and at most max_tokens=16",
    ),
    "cache_salt": (
        {"text": "two", "cache_salt": "ก" * 86},
        "cache_salt of 258 bytes is longer than 256",
    ),
    "priority": ({"text": "two", "priority": 11}, "priority=11 must be in [-10, 10]"),
    "priority < 0": ({"text": "two", "priority": -11}, "priority=-11 must be in [-10, 10]"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_refused_by_name(engine: FakeEngine, client: Client, case: str) -> None:
    fields, message = BAD_REQUESTS[case]
    code, details = status_of(client.generate(**fields))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(message)
    assert engine.added.empty()


def test_a_prompt_of_5_mb_is_refused_by_us(engine: FakeEngine, client: Client) -> None:
    code, details = status_of(client.generate("ก" * 1_700_000))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details == "prompt of 5100000 bytes is longer than max_prompt_bytes=4194304"
    with pytest.raises(grpc.RpcError, match="text of 5100000 bytes is longer than"):
        client.call("Tokenize", text="ก" * 1_700_000)
    assert engine.added.empty()


def test_fields_of_a_newer_client_are_refused(channel: grpc.Channel) -> None:
    raw = channel.unary_stream("/lockstep.v1.Inference/Generate")
    request = inference_pb2.GenerateRequest(text="two").SerializeToString()
    code, details = status_of(raw(request + b"\x40\x01", metadata=bearer(API_KEY)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "the request has fields that this server doesn't know, numbers [8]" in details


def test_tokenize_and_detokenize(engine: FakeEngine, client: Client) -> None:
    tokenizer = Tokenizer.load(engine.model.path)
    for text in TEXTS:
        token_ids = client.call("Tokenize", text=text).token_ids
        assert list(token_ids) == tokenizer.encode(text)
        assert client.call("Detokenize", token_ids=[0, *token_ids, 1]).text == text
    assert client.call("Detokenize").text == ""


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([5, -1], "token id -1 must be in"),
        ([VOCAB_SIZE, 5], "token id 600 must be in"),
        ([5] * 4097, "token_ids has 4097 tokens: more than max_model_len=4096"),
    ],
)
def test_detokenize_refuses_by_name(client: Client, token_ids: list[int], message: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        client.call("Detokenize", token_ids=token_ids)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details().startswith(message)


def test_model_and_stats_are_the_engines(engine: FakeEngine, client: Client) -> None:
    assert client.call("GetModel") == inference_pb2.GetModelResponse(
        model="tiny",
        architecture="TinyForCausalLM",
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[1],
        tp_size=2,
        default_sampling_params=common_pb2.SamplingParams(
            max_tokens=16, temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1
        ),
    )
    stats = client.call("GetStats").engines[0].stats
    assert (stats.num_steps, stats.num_free_blocks) == (10, 90)


def test_a_model_without_tokenizer_takes_and_gives_tokens(tmp_path: Path) -> None:
    engine = FakeEngine(make_model(str(tmp_path)))
    server = EngineServer(engine, "engine-token")
    server.start()
    with RunningFrontend(server) as frontend, grpc.insecure_channel(frontend.address) as channel:
        client = Client(channel)
        code, details = status_of(client.generate("two"))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "model tiny has no tokenizer.json" in details
        assert "send token_ids" in details
        call = client.generate(token_ids=[5])
        connection, request = engine.added.get(timeout=TIMEOUT_S)
        connection.sink([RequestOutput(request.request_id, (7,), FinishReason.LENGTH)])
        assert [(response.text, list(response.token_ids)) for response in call] == [("", [7])]
    server.stop(grace_s=5)
