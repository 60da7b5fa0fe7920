"""What sampling needs beyond its columns, as it goes over the wire."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import worker_pb2
from runtime.scheduling.sampler_inputs import SamplerInputs
from runtime.scheduling.token_masks import TokenMasks

INT32 = np.dtype("<i4")
UINT32 = np.dtype("<u4")
FLOAT32 = np.dtype("<f4")


def encode_inputs(inputs: SamplerInputs) -> worker_pb2.SamplerInputs:
    biases, words, history = inputs.biases, inputs.bad_words, inputs.history
    return worker_pb2.SamplerInputs(
        biases=worker_pb2.TokenBiases(
            rows=to_bytes(biases.rows, INT32),
            token_ids=to_bytes(biases.token_ids, INT32),
            values=to_bytes(biases.values, FLOAT32),
        ),
        masks=encode_masks(inputs.masks),
        bad_words=worker_pb2.BadWords(
            rows=to_bytes(words.rows, INT32),
            lengths=to_bytes(words.lengths, INT32),
            token_ids=to_bytes(words.token_ids, INT32),
        ),
        history=worker_pb2.TokenHistory(
            rows=to_bytes(history.rows, INT32),
            lengths=to_bytes(history.lengths, INT32),
            num_prompt_tokens=to_bytes(history.num_prompt_tokens, INT32),
            token_ids=to_bytes(history.token_ids, INT32),
        ),
    )


def encode_masks(masks: TokenMasks) -> worker_pb2.TokenMasks:
    return worker_pb2.TokenMasks(
        rows=to_bytes(masks.rows, INT32),
        kinds=masks.kinds.tobytes(),
        num_words=to_bytes(masks.num_words, INT32),
        words=to_bytes(masks.words, UINT32),
    )


def to_bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()
