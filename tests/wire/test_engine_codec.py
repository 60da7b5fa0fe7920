"""The messages of engine.proto: what is refused, what takes its default."""

import pytest

from protos import common_pb2, engine_pb2
from runtime import engine_codec
from runtime.errors import CapacityError
from runtime.request import FinishReason, Request, RequestFailure, RequestOutput
from runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.wire

EVERY_PARAMETER = SamplingParams(
    max_tokens=9,
    temperature=0.5,
    top_k=4,
    top_p=0.25,
    seed=77,
    ignore_eos=True,
    n=128,
    min_tokens=9,
)


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


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "n", "min_tokens"])
def test_unset_parameters_take_the_documented_defaults(name: str) -> None:
    message = common_pb2.SamplingParams(**{name: 5})
    assert engine_codec.decode_params(message) == SamplingParams(**{name: 5})
    assert engine_codec.decode_params(common_pb2.SamplingParams()) == SamplingParams()


def test_when_to_try_again_is_rounded_up() -> None:
    failure = RequestFailure(1, CapacityError("full", retry_after_s=0.0001))
    assert engine_codec.encode_failure(failure).retry_after_ms == 1


def test_a_full_engine_that_names_no_time_is_refused() -> None:
    message = engine_pb2.RequestFailed(kind=engine_pb2.RequestFailed.KIND_CAPACITY)
    with pytest.raises(ValueError, match="retry_after_ms is missing"):
        engine_codec.decode_failure(message)
