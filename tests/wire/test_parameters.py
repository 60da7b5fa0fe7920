"""Sampling parameters through the public API: each travels as it is, or is refused by name."""

import math
from dataclasses import fields
from typing import Any

import grpc
import pytest

from protos import common_pb2, inference_pb2
from protos.auth import bearer
from runtime.frontend.text import Tokenizer
from runtime.request import FinishReason, RequestOutput
from runtime.sampling_params import CompleteParams, SamplingParams
from tests.frontend import (
    API_KEY,
    LINES,
    MAX_MODEL_LEN,
    TIMEOUT_S,
    VOCAB_SIZE,
    Client,
    FakeEngine,
    make_byte_fallback_tokenizer,
    status_of,
)
from tests.params import complete_params

pytestmark = pytest.mark.wire

TOKENIZER = Tokenizer(make_byte_fallback_tokenizer(LINES))  # the model's
PROMPT = [5, 6]
KIB_64 = 64 << 10

# For each parameter a value that isn't the default, exact in what the wire has for it.
VALUES: dict[str, Any] = {
    "max_tokens": 9,
    "temperature": 0.1,
    "top_k": 4,
    "top_p": 0.3,
    "min_p": 0.7,
    "seed": 2**64 - 1,
    "n": 3,
    "presence_penalty": -1.1,
    "frequency_penalty": 1.3,
    "repetition_penalty": 0.9,
    "logit_bias": {5: -100.0, 599: 0.25},
    "allowed_token_ids": (7, 3, 599),
    "bad_words": ("fox", " dog"),
    "min_tokens": 2,
    "ignore_eos": True,
    "stop": ("STOP", "ก\n"),
    "stop_token_ids": (9, 0),
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "json_schema": '{"type": "integer"}',
    "regex": "",
    "grammar": 'start: "a"',
    "choices": ("a", "b"),
}
STRUCTURES = ("json_schema", "regex", "grammar", "choices")
EXCLUSIVE = (*STRUCTURES[1:], "ignore_eos", "min_tokens")


def reached(engine: FakeEngine, client: Client, **params: Any) -> tuple[CompleteParams, Any]:
    """What the engine gets of a request that the client sends; the request is ended."""
    call = client.generate(token_ids=PROMPT, **params)
    try:
        connection, request = engine.added.get(timeout=TIMEOUT_S)
    except BaseException:
        pytest.fail(f"{params} was refused: {status_of(call)}")
    connection.sink(
        [
            RequestOutput(request.request_id, (7,), FinishReason.LENGTH, index)
            for index in range(request.params.n)
        ]
    )
    list(call)
    return request.params, request


def test_every_parameter_is_on_the_wire_and_has_a_value_here() -> None:
    names = {each.name for each in fields(SamplingParams)}
    assert names == VALUES.keys()
    assert names == {each.name for each in common_pb2.SamplingParams.DESCRIPTOR.fields}
    for name, value in VALUES.items():
        assert getattr(complete_params(), name) != value, f"{name} has the default"


@pytest.mark.parametrize("name", VALUES)
def test_a_parameter_reaches_the_engine_as_it_is(
    engine: FakeEngine, client: Client, name: str
) -> None:
    params, request = reached(engine, client, **{name: VALUES[name]})
    wanted = {"seed": request.seed} | {name: VALUES[name]}
    assert params == complete_params(**wanted)
    assert type(getattr(params, name)) is type(VALUES[name])
    assert request.seed == params.seed


@pytest.mark.parametrize("without", [EXCLUSIVE, STRUCTURES])
def test_all_parameters_travel_together(
    engine: FakeEngine, client: Client, without: tuple[str, ...]
) -> None:
    values = {name: value for name, value in VALUES.items() if name not in without}
    params, request = reached(engine, client, **values)
    assert params == complete_params(**values)
    assert request.prompt_token_ids == PROMPT


def test_bad_words_reach_the_engine_as_tokens_too(engine: FakeEngine, client: Client) -> None:
    """As they are written inside a word and at the start of one; equal ways once."""
    _, request = reached(engine, client, bad_words=["fox", " dog"])
    words = [TOKENIZER.encode(text, add_special_tokens=False) for text in ("fox", " fox", " dog")]
    assert request.bad_words == tuple(map(tuple, words))


# The last values that pass.
EDGES: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": MAX_MODEL_LEN - len(PROMPT)},
    {"temperature": 0.0},
    {"temperature": 1e-5},
    {"temperature": 1e5},
    {"top_k": 0},
    {"top_k": 2**31 - 1},
    {"top_p": 1e-9},
    {"top_p": 1.0},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"seed": 0},
    {"n": 1},
    {"n": 128},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0, "repetition_penalty": 0.01},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 100.0},
    {"logit_bias": {0: -100.0, VOCAB_SIZE - 1: 100.0}},
    {"allowed_token_ids": [0, VOCAB_SIZE - 1]},
    {"allowed_token_ids": [1] * (1 << 18)},
    {"bad_words": ["x" * 64] + ["y"] * 255},
    {"min_tokens": 16},
    {"min_tokens": 0},
    {"stop": ["ก" * 1024] + ["x"] * 15},
    {"stop_token_ids": [0, VOCAB_SIZE - 1] * 128},
    {"logprobs": 20, "prompt_logprobs": 20},
    {"json_schema": '"' + "x" * (KIB_64 - 2) + '"'},
    {"regex": "x" * KIB_64},
    {"choices": ["x"] * 4096},
]

# What comes just past them, and what is said of it.
PAST: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
    ({"max_tokens": -(2**31)}, "max_tokens=-2147483648 must be at least 1"),
    (
        {"max_tokens": MAX_MODEL_LEN - 1},
        "prompt of 2 tokens + max_tokens=4095 is 4097 tokens: more ",
    ),
    ({"max_tokens": 2**31 - 1}, "prompt of 2 tokens + max_tokens=2147483647 is 2147483649 tokens"),
    ({"temperature": -1e-9}, "temperature=-1e-09 must be 0 (greedy) or in [1e-05, 100000.0]"),
    ({"temperature": 9e-6}, "temperature=9e-06 must be"),
    ({"temperature": 100001.0}, "temperature=100001.0 must be"),
    ({"temperature": math.nan}, "temperature=nan must be"),
    ({"temperature": math.inf}, "temperature=inf must be"),
    ({"top_k": -1}, "top_k=-1 must be at least 0"),
    ({"top_p": 9e-10}, "top_p=9e-10 must be in [1e-09, 1]"),
    ({"top_p": 1.0000001}, "top_p=1.0000001 must be in [1e-09, 1]"),
    ({"top_p": math.nan}, "top_p=nan must be in [1e-09, 1]"),
    ({"min_p": -0.01}, "min_p=-0.01 must be in [0, 1]"),
    ({"min_p": 1.01}, "min_p=1.01 must be in [0, 1]"),
    ({"min_p": math.nan}, "min_p=nan must be in [0, 1]"),
    ({"n": 0}, "n=0 must be in [1, 128]"),
    ({"n": 129}, "n=129 must be in [1, 128]"),
    ({"presence_penalty": 2.01}, "presence_penalty=2.01 must be in [-2, 2]"),
    ({"presence_penalty": -2.01}, "presence_penalty=-2.01 must be in [-2, 2]"),
    ({"presence_penalty": math.nan}, "presence_penalty=nan must be in [-2, 2]"),
    ({"frequency_penalty": 2.01}, "frequency_penalty=2.01 must be in [-2, 2]"),
    ({"frequency_penalty": -math.inf}, "frequency_penalty=-inf must be in [-2, 2]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be in [0.01, 100]"),
    ({"repetition_penalty": 0.009}, "repetition_penalty=0.009 must be in [0.01, 100]"),
    ({"repetition_penalty": 100.1}, "repetition_penalty=100.1 must be in [0.01, 100]"),
    ({"logit_bias": {5: 100.5}}, "logit_bias[5]=100.5 must be in [-100, 100]"),
    ({"logit_bias": {5: -math.inf}}, "logit_bias[5]=-inf must be in [-100, 100]"),
    ({"logit_bias": {5: math.nan}}, "logit_bias[5]=nan must be in [-100, 100]"),
    ({"logit_bias": {5: 0.0, -1: 0.0}}, "logit_bias token id -1 must be in [0, 600)"),
    ({"logit_bias": {VOCAB_SIZE: 0.0}}, "logit_bias token id 600 must be in [0, 600)"),
    (
        {"logit_bias": dict.fromkeys(range(1025), 0.0)},
        "logit_bias has 1025 entries: must be at most 1024",
    ),
    ({"allowed_token_ids": [5, -1]}, "allowed_token_ids -1 must be in [0, 600)"),
    ({"allowed_token_ids": [VOCAB_SIZE, 5]}, "allowed_token_ids 600 must be in [0, 600)"),
    (
        {"allowed_token_ids": [1] * ((1 << 18) + 1)},
        "allowed_token_ids has 262145 entries: must be at most 262144",
    ),
    ({"bad_words": ["x", ""]}, "bad_words[1] is empty: it must have a character"),
    ({"bad_words": ["x"] * 257}, "bad_words has 257 entries: must be at most 256"),
    ({"bad_words": ["x", "y" * 1025]}, "bad_words[1] has 1025 characters: must be at most 1024"),
    ({"bad_words": ["x" * 65]}, "bad_words[0] has 65 tokens: must be at most 64"),
    ({"min_tokens": -1}, "min_tokens=-1 must be at least 0 and at most max_tokens"),
    ({"min_tokens": 17}, "min_tokens=17 must be at least 0 and at most max_tokens=16"),
    ({"stop": ["x", ""]}, "stop[1] is empty: it must have a character"),
    ({"stop": ["x"] * 17}, "stop has 17 entries: must be at most 16"),
    ({"stop": ["ก" * 1025]}, "stop[0] has 1025 characters: must be at most 1024"),
    ({"stop_token_ids": [5, -1]}, "stop_token_ids -1 must be in [0, 600)"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids 600 must be in [0, 600)"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids has 257 entries: must be at most 256"),
    ({"logprobs": -1}, "logprobs=-1 must be in [0, 20]"),
    ({"logprobs": 21}, "logprobs=21 must be in [0, 20]"),
    ({"prompt_logprobs": -1}, "prompt_logprobs=-1 must be in [0, 20]"),
    ({"prompt_logprobs": 21}, "prompt_logprobs=21 must be in [0, 20]"),
    ({"json_schema": "x" * (KIB_64 + 1)}, "json_schema has 65537 bytes: must be at most 65536"),
    ({"regex": "ก" * (KIB_64 // 3 + 1)}, "regex has 65538 bytes: must be at most 65536"),
    ({"grammar": "x" * (KIB_64 + 1)}, "grammar has 65537 bytes: must be at most 65536"),
    ({"choices": ["a", ""]}, "choices[1] is empty: it must have a character"),
    ({"choices": ["x"] * 4097}, "choices has 4097 entries: must be at most 4096"),
    ({"choices": ["x" * KIB_64]}, "choices has 65540 bytes: must be at most 65536"),
    ({"regex": "a", "choices": ["a"]}, "regex and choices are set: at most one may be"),
    ({"json_schema": "", "regex": ""}, "json_schema and regex are set: at most one may be"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos=True is set with regex: an output that is"),
    ({"choices": ["a"], "min_tokens": 1}, "min_tokens=1 is set with choices: an output that is"),
]


def test_every_limited_parameter_has_a_case() -> None:
    limited = {name for values, _ in PAST for name in values}
    flags = {each.name for each in fields(SamplingParams) if each.type is bool}
    assert limited | flags | {"seed"} == VALUES.keys()  # no seed is wrong


def test_the_edges_pass(engine: FakeEngine, client: Client) -> None:
    for values in EDGES:
        params, _ = reached(engine, client, **values)
        for name, value in values.items():
            value = tuple(value) if isinstance(value, list) else value
            assert getattr(params, name) == value


def test_what_is_past_them_is_refused_by_name_and_hurts_no_other(
    engine: FakeEngine, client: Client
) -> None:
    running = client.generate("two")
    connection, request = engine.added.get(timeout=TIMEOUT_S)
    connection.sink([RequestOutput(request.request_id, (7,))])
    assert list(next(running).token_ids) == [7]
    for values, message in PAST:
        code, details = status_of(client.generate(token_ids=PROMPT, **values))
        assert code == grpc.StatusCode.INVALID_ARGUMENT, details
        assert details.startswith(message)
    assert engine.added.empty()
    connection.sink([RequestOutput(request.request_id, (8,), FinishReason.LENGTH)])
    assert [list(response.token_ids) for response in running] == [[8]]


def test_a_parameter_of_a_newer_client_is_refused(engine: FakeEngine, channel: Any) -> None:
    params = common_pb2.SamplingParams()
    params.MergeFromString(b"\xd0\x01\x05")  # number 26
    request = inference_pb2.GenerateRequest(text="two", sampling_params=params)
    raw = channel.unary_stream("/lockstep.v1.Inference/Generate")
    code, details = status_of(raw(request.SerializeToString(), metadata=bearer(API_KEY)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(
        "sampling_params has fields that this server doesn't know, numbers [26]"
    )
    assert engine.added.empty()
