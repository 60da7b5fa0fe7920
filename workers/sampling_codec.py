"""Between the wire's messages and the sampler: what rows ask for, and what they get.

S sequences, R sampled rows, P scored rows, V vocabulary.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import worker_pb2
from workers.arrays import (
    FLOAT32,
    INT32,
    UINT64,
    Int32,
    check_range,
    read_array,
    to_int64,
    to_tensor,
)
from workers.batch import (
    NO_INPUTS,
    BadWords,
    Batch,
    MaskKind,
    SamplerInputs,
    SamplingColumns,
    TokenBiases,
    TokenHistory,
    TokenMasks,
)
from workers.errors import StepError
from workers.sampling.logprobs import Logprobs
from workers.sampling.sampler import Samples

KINDS = [kind.value for kind in MaskKind]
INFINITY = float("inf")
# What no driver asks for, and what rows of logits can bear.
MAX_BIAS = 1e6
MAX_LOGPROBS = 1024
# Column, its number format, least and most, both allowed.
COLUMNS = (
    ("temperature", FLOAT32, 0, np.finfo(np.float32).max),
    ("top_k", INT32, 0, INFINITY),
    ("top_p", FLOAT32, np.finfo(np.float32).tiny, 1),
    ("min_p", FLOAT32, 0, 1),
    ("seed", UINT64, 0, INFINITY),
    ("min_length", INT32, 0, INFINITY),
    ("presence_penalty", FLOAT32, -100, 100),
    ("frequency_penalty", FLOAT32, -100, 100),
    ("repetition_penalty", FLOAT32, 1e-3, 1e3),
    ("num_logprobs", INT32, -1, MAX_LOGPROBS),
)


def decode_columns(columns: worker_pb2.SamplingColumns, num_sequences: int) -> SamplingColumns:
    """Raises StepError: a column has a wrong length, or a number is out of range."""
    tensors = {}
    for name, dtype, low, high in COLUMNS:
        label = f"sampling.{name}"
        values = read_array(label, getattr(columns, name), dtype, num_sequences, "sequence_ids")
        inside = (values >= low) & (values <= high)  # NaN fails both
        if not inside.all():
            raise StepError(f"{label} {values[~inside][0]} must be in [{low}, {high}]")
        tensors[name] = to_tensor(values.view(np.int64) if dtype is UINT64 else values)
    return SamplingColumns(**tensors)


def decode_inputs(
    inputs: worker_pb2.SamplerInputs, num_rows: int, vocab_size: int
) -> SamplerInputs:
    """Raises StepError: arrays don't fit together, or a number is out of range."""
    if not inputs.ByteSize():  # as in most steps
        return NO_INPUTS
    return SamplerInputs(
        biases=_decode_biases(inputs.biases, num_rows, vocab_size),
        masks=decode_masks("masks", inputs.masks, num_rows, vocab_size),
        bad_words=_decode_bad_words(inputs.bad_words, num_rows, vocab_size),
        history=_decode_history(inputs.history, num_rows, vocab_size),
    )


def decode_masks(
    name: str, masks: worker_pb2.TokenMasks, num_rows: int, vocab_size: int
) -> TokenMasks:
    """Raises StepError, as `decode_inputs`."""
    rows = _rows(name, masks.rows, num_rows, repeated=False)
    kinds = np.frombuffer(masks.kinds, np.uint8)
    if len(kinds) != len(rows) or not np.isin(kinds, KINDS).all():
        raise StepError(f"{name}.kinds {kinds.tolist()} must be one of {KINDS} for each row")
    lengths = _lengths(f"{name}.num_words", masks.num_words, len(rows), low=0)
    words = read_array(f"{name}.words", masks.words, INT32, int(lengths.sum()), "num_words")
    is_bits = kinds == MaskKind.BITS
    num_bits = lengths[is_bits]
    if (num_bits != -(-vocab_size // 32)).any():
        raise StepError(
            f"{name}.num_words {num_bits.tolist()} of bits must be {-(-vocab_size // 32)}, for a "
            f"vocabulary of {vocab_size}"
        )
    check_range(f"{name}.words", words[np.repeat(~is_bits, lengths)], 0, vocab_size)
    return TokenMasks(
        rows=to_int64(rows),
        kinds=to_tensor(kinds),
        num_words=to_int64(lengths),
        words=to_tensor(words),
    )


def encode_result(batch: Batch, samples: Samples, scores: Logprobs) -> worker_pb2.StepResult:
    """One token for each sampled row, in their order."""
    sequence_ids = np.array(batch.sequence_ids, UINT64)[batch.sample_sequence.numpy()]
    faults = samples.faults.numpy()
    fault_rows = np.flatnonzero(faults)
    return worker_pb2.StepResult(
        sequence_ids=sequence_ids.tobytes(),
        num_tokens=np.ones(len(sequence_ids), INT32).tobytes(),
        token_ids=_bytes(samples.token_ids.numpy(), INT32),
        logprobs=_encode_logprobs(samples.logprobs),
        scores=_encode_logprobs(scores),
        fault_rows=_bytes(fault_rows, INT32),
        faults=faults[fault_rows].astype(np.uint8).tobytes(),
    )


def _decode_biases(biases: worker_pb2.TokenBiases, num_rows: int, vocab_size: int) -> TokenBiases:
    rows = _rows("biases", biases.rows, num_rows, repeated=True)
    ids = read_array("biases.token_ids", biases.token_ids, INT32, len(rows), "biases.rows")
    check_range("biases.token_ids", ids, 0, vocab_size)
    values = read_array("biases.values", biases.values, FLOAT32, len(rows), "biases.rows")
    if not (values <= MAX_BIAS).all() or ((values < -MAX_BIAS) & (values > -INFINITY)).any():
        raise StepError(f"biases.values must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}], or -inf")
    return TokenBiases(rows=to_int64(rows), token_ids=to_int64(ids), values=to_tensor(values))


def _decode_bad_words(words: worker_pb2.BadWords, num_rows: int, vocab_size: int) -> BadWords:
    rows = _rows("bad_words", words.rows, num_rows, repeated=True)
    lengths = _lengths("bad_words.lengths", words.lengths, len(rows), low=2)
    total = int(lengths.sum())
    ids = read_array("bad_words.token_ids", words.token_ids, INT32, total, "bad_words.lengths")
    check_range("bad_words.token_ids", ids, 0, vocab_size)
    return BadWords(rows=to_int64(rows), lengths=to_int64(lengths), token_ids=to_int64(ids))


def _decode_history(
    history: worker_pb2.TokenHistory, num_rows: int, vocab_size: int
) -> TokenHistory:
    rows = _rows("history", history.rows, num_rows, repeated=False)
    lengths = _lengths("history.lengths", history.lengths, len(rows), low=1)
    prompts = _lengths("history.num_prompt_tokens", history.num_prompt_tokens, len(rows), low=0)
    if (prompts > lengths).any():
        raise StepError("history.num_prompt_tokens has more tokens than history.lengths")
    total = int(lengths.sum())
    ids = read_array("history.token_ids", history.token_ids, INT32, total, "history.lengths")
    check_range("history.token_ids", ids, 0, vocab_size)
    return TokenHistory(
        rows=to_int64(rows),
        lengths=to_int64(lengths),
        num_prompt_tokens=to_int64(prompts),
        token_ids=to_int64(ids),
    )


def _rows(name: str, data: bytes, num_rows: int, *, repeated: bool) -> Int32:
    """Rising indices into R; `repeated` where a row may come several times."""
    rows = read_array(f"{name}.rows", data, INT32)
    check_range(f"{name}.rows", rows, 0, num_rows)
    least = 0 if repeated else 1
    if (np.diff(rows) < least).any():
        raise StepError(f"{name}.rows {rows.tolist()} must rise")
    return rows


def _lengths(name: str, data: bytes, count: int, *, low: int) -> NDArray[np.int64]:
    lengths = read_array(name, data, INT32, count, "rows").astype(np.int64)
    if (lengths < low).any():
        raise StepError(f"{name} has {lengths.min()}: must be at least {low}")
    return lengths


def _encode_logprobs(logprobs: Logprobs) -> worker_pb2.Logprobs:
    if len(logprobs.rows) == 0:  # as in most steps
        return worker_pb2.Logprobs()
    tops = logprobs.top_token_ids.numpy()
    num_tops = logprobs.num_tops.numpy()
    used = np.arange(tops.shape[1]) < num_tops[:, None]
    return worker_pb2.Logprobs(
        rows=_bytes(logprobs.rows.numpy(), INT32),
        logprobs=_bytes(logprobs.logprobs.numpy(), FLOAT32),
        num_tops=_bytes(num_tops, INT32),
        top_token_ids=_bytes(tops[used], INT32),
        top_logprobs=_bytes(logprobs.top_logprobs.numpy()[used], FLOAT32),
    )


def _bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()
