"""The messages of engine.proto: what is refused, what takes its default."""

import pytest

from protos import common_pb2
from runtime import engine_codec
from runtime.request import RequestOutput
from runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.wire


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("request_ids", b"1234567", "request_ids has 7 bytes: must be a multiple of 8"),
        ("request_ids", bytes(24), "request_ids has 3 values, num_tokens 2, finish_reasons 2"),
        ("token_ids", bytes(8), "num_tokens sum to 3, token_ids has 2 values"),
        ("finish_reasons", bytes([0, 77]), "77 is not a valid FinishReason"),
    ],
)
def test_malformed_outputs_are_refused_by_name(field: str, value: bytes, message: str) -> None:
    outputs = engine_codec.encode_outputs([RequestOutput(1, (5, 6)), RequestOutput(2, (7,))])
    setattr(outputs, field, value)
    with pytest.raises(ValueError, match=message):
        engine_codec.decode_outputs(outputs)


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed"])
def test_unset_parameters_take_the_documented_defaults(name: str) -> None:
    message = common_pb2.SamplingParams(**{name: 5})
    assert engine_codec.decode_params(message) == SamplingParams(**{name: 5})
    assert engine_codec.decode_params(common_pb2.SamplingParams()) == SamplingParams()
