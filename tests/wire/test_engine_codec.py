"""The messages of engine.proto: what is refused, what takes its default."""

import struct
from dataclasses import fields

import pytest

from protos import common_pb2, engine_pb2
from runtime import engine_codec
from runtime.errors import CapacityError
from runtime.failure_codec import decode_failure, encode_failure
from runtime.request import FinishReason, Request, RequestFailure, RequestOutput, TokenLogprobs
from runtime.sampling_params import CompleteParams, SamplingDefaults, SamplingParams
from tests.frontend import make_model
from tests.params import complete_params

pytestmark = pytest.mark.wire

EVERY_PARAMETER = CompleteParams(
    max_tokens=9,
    temperature=0.1,
    top_k=4,
    top_p=0.3,
    min_p=0.7,
    seed=77,
    n=128,
    presence_penalty=-1.1,
    frequency_penalty=1.3,
    repetition_penalty=0.9,
    logit_bias={0: -100.0, 2**31 - 1: 0.25},
    allowed_token_ids=(3, 2**31 - 1),
    bad_words=("bäd", "word"),
    min_tokens=9,
    ignore_eos=True,
    stop=("\n", "ก"),
    stop_token_ids=(0, 2**31 - 1),
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    logprobs=0,
    prompt_logprobs=20,
)
STRUCTURES = {"json_schema": "{}", "regex": "", "grammar": "start: ก", "choices": ("a", "ก")}
SOME = TokenLogprobs(-0.5, (3, 2**31 - 1), (-0.25, -0.5))
ZERO = TokenLogprobs(-9999.0, (), ())


def test_every_parameter_is_here() -> None:
    """Whoever adds one has it checked below."""
    unset = {
        each.name
        for each in fields(SamplingParams)
        if getattr(EVERY_PARAMETER, each.name) == getattr(complete_params(), each.name)
    }
    assert unset == STRUCTURES.keys()


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_comes_back_as_it_was(name: str) -> None:
    params = complete_params(seed=7, **{name: STRUCTURES[name]})
    request = Request(request_id=1, prompt_token_ids=[3], params=params, seed=7)
    back = engine_codec.decode_request(engine_codec.encode_request(request))
    assert back == request
    assert back.params.structure == params.structure is not None


def test_a_request_comes_back_as_it_was() -> None:
    request = Request(
        request_id=2**64 - 1,
        prompt_token_ids=[3, 2**31 - 1],
        params=EVERY_PARAMETER,
        seed=77,
        cache_salt="sål",
        priority=-10,
        tenant="acme",
        timeout_s=0.3,
        bad_words=((3,), (4, 2**31 - 1)),
    )
    assert engine_codec.decode_request(engine_codec.encode_request(request)) == request


@pytest.mark.parametrize(("timeout_s", "decoded"), [(None, None), (0.0, 0.0), (-1.0, 0.0)])
def test_a_client_that_waits_for_ever_differs_from_one_that_waits_no_more(
    timeout_s: float | None, decoded: float | None
) -> None:
    request = Request(
        request_id=1,
        prompt_token_ids=[3],
        params=EVERY_PARAMETER,
        seed=77,
        timeout_s=timeout_s,
    )
    back = engine_codec.decode_request(engine_codec.encode_request(request))
    assert back.timeout_s == decoded


def test_outputs_come_back_as_they_were() -> None:
    outputs = [
        RequestOutput(2**64 - 1, (1, 2, 70000), choice=127, num_cached_tokens=2**31 - 1),
        RequestOutput(3, ()),
        RequestOutput(3, (9,), FinishReason.LENGTH, 1, 16),
        RequestOutput(3, (9, 8), None, 2, 16, (SOME, ZERO), (ZERO, SOME, SOME)),
        RequestOutput(4, (), None, 0, 0, (), (SOME,)),
    ]
    assert engine_codec.decode_outputs(engine_codec.encode_outputs(outputs)) == outputs


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("request_ids", b"1234567", "request_ids has 7 bytes: must be a multiple of 8"),
        ("indices", b"1234567", "indices has 7 bytes: must be a multiple of 4"),
        ("num_cached_tokens", b"123", "num_cached_tokens has 3 bytes: must be a multiple of 4"),
        ("request_ids", bytes(24), "as many values: request_ids 3, num_tokens 2,"),
        ("num_tokens", bytes(4), "request_ids 2, num_tokens 1, finish_reasons 2"),
        ("finish_reasons", bytes(3), "finish_reasons 3, indices 2"),
        ("indices", bytes(4), "indices 1, num_cached_tokens 2"),
        ("num_cached_tokens", b"", "indices 2, num_cached_tokens 0"),
        ("token_ids", bytes(8), "num_tokens sum to 3, token_ids has 2 values"),
        ("num_tokens", bytes([4, 0, 0, 0, 255, 255, 255, 255]), "num_tokens sum to 3"),
        ("finish_reasons", bytes([0, 77]), "77 is not a valid FinishReason"),
    ],
)
def test_malformed_outputs_are_refused_by_name(field: str, value: bytes, message: str) -> None:
    outputs = engine_codec.encode_outputs([RequestOutput(1, (5, 6)), RequestOutput(2, (7,))])
    setattr(outputs, field, value)
    with pytest.raises(ValueError, match=message):
        engine_codec.decode_outputs(outputs)


def test_logprobs_that_nobody_wants_cost_nothing() -> None:
    message = engine_codec.encode_outputs([RequestOutput(1, (5, 6)), RequestOutput(2, (7,))])
    assert not message.HasField("logprobs")
    assert not message.HasField("prompt_logprobs")


INTS = "<{}i"


@pytest.mark.parametrize("column", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_entries", b"12345", "num_entries has 5 bytes: must be a multiple of 4"),
        ("logprobs", b"1", "logprobs has 1 bytes: must be a multiple of 4"),
        ("num_tops", b"123", "num_tops has 3 bytes: must be a multiple of 4"),
        ("top_token_ids", b"123", "top_token_ids has 3 bytes: must be a multiple of 4"),
        ("top_logprobs", b"123", "top_logprobs has 3 bytes: must be a multiple of 4"),
        ("num_entries", [2, 1, 0], "num_entries has 3 values that sum to 3"),
        ("num_entries", [3], "num_entries has 1 values that sum to 3"),
        ("num_entries", [2, 2], "num_entries has 2 values that sum to 4"),
        ("num_entries", [4, -1], "num_entries has 2 values"),
        ("logprobs", [0] * 2, "sum to 3, num_tops 3"),
        ("num_tops", [2, 0], "num_tops 2 that sum to 2"),
        ("num_tops", [2, 1, 2], "num_tops 3 that sum to 5"),
        ("num_tops", [5, 0, -1], "num_tops 3 that sum to 4"),
        ("top_token_ids", [1, 2, 3], "that sum to 4"),
        ("top_logprobs", [0] * 3, "top_logprobs 3: must be"),
        ("top_logprobs", [], "top_logprobs 0: must be"),
    ],
)
def test_malformed_logprobs_are_refused_by_name(
    column: str, field: str, value: bytes | list[int], message: str
) -> None:
    entries = {column.replace("prompt_logprobs", "scores"): (SOME, SOME)}
    outputs = engine_codec.encode_outputs(
        [
            RequestOutput(1, (5, 6), **entries),
            RequestOutput(2, (7,), **dict.fromkeys(entries, (ZERO,))),
        ]
    )
    data = value if isinstance(value, bytes) else struct.pack(INTS.format(len(value)), *value)
    setattr(getattr(outputs, column), field, data)
    with pytest.raises(ValueError, match=rf"^{column}[.:].*{message}"):
        engine_codec.decode_outputs(outputs)


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "n", "min_tokens"])
def test_unset_parameters_stay_unset(name: str) -> None:
    message = common_pb2.SamplingParams(**{name: 5})
    assert engine_codec.decode_params(message) == SamplingParams(**{name: 5})
    assert engine_codec.decode_params(common_pb2.SamplingParams()) == SamplingParams()


def test_zeros_and_ones_that_are_set_stay_set() -> None:
    values = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    sent = common_pb2.SamplingParams(**values).SerializeToString()
    params = engine_codec.decode_params(common_pb2.SamplingParams.FromString(sent))
    assert params == SamplingParams(**values)


DEFAULTS = SamplingDefaults(
    max_tokens=2**31 - 1, temperature=0.0, top_k=0, top_p=0.3, min_p=0.7, repetition_penalty=0.9
)


def test_a_model_comes_back_as_it_was() -> None:
    model = make_model("folder", defaults=DEFAULTS)
    sent = engine_codec.encode_info(model).SerializeToString()
    assert engine_codec.decode_info(engine_pb2.EngineInfo.FromString(sent)) == model


@pytest.mark.parametrize("name", [each.name for each in fields(SamplingDefaults)])
def test_a_model_without_one_of_its_defaults_is_refused(name: str) -> None:
    info = engine_codec.encode_info(make_model(defaults=DEFAULTS))
    info.default_sampling_params.ClearField(name)
    with pytest.raises(ValueError, match=f"default_sampling_params has no {name}: engine and"):
        engine_codec.decode_info(info)


def test_when_to_try_again_is_rounded_up() -> None:
    failure = RequestFailure(1, CapacityError("full", retry_after_s=0.0001))
    assert encode_failure(failure).retry_after_ms == 1


def test_a_full_engine_that_names_no_time_is_refused() -> None:
    message = engine_pb2.RequestFailed(kind=engine_pb2.RequestFailed.KIND_CAPACITY)
    with pytest.raises(ValueError, match="retry_after_ms is missing"):
        decode_failure(message)
