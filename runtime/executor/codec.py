"""Between the driver's plans and the wire: StepPlan to bytes, StepReply to StepResult."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import worker_pb2
from runtime.request import RankSummary, TokenLogprobs
from runtime.scheduling.sampler_inputs import SamplerInputs, no_inputs
from runtime.scheduling.step_plan import (
    BlockTables,
    Execution,
    Fault,
    SamplingColumns,
    StepPlan,
    StepResult,
)
from runtime.scheduling.token_masks import TokenMasks

INT32 = np.dtype("<i4")
UINT32 = np.dtype("<u4")
UINT64 = np.dtype("<u8")
FLOAT32 = np.dtype("<f4")
US_PER_S = 1_000_000

COPY = worker_pb2.BlockOp.KIND_COPY


def encode_step(plan: StepPlan, *, epoch: int, return_input_hash: bool) -> bytes:
    """A serialized StepRequest: encoded once, the same bytes for every rank."""
    request = worker_pb2.StepRequest(
        epoch=epoch,
        step_id=plan.step_id,
        return_input_hash=return_input_hash,
        plan=worker_pb2.StepPlan(
            input_ids=_bytes(plan.input_ids, INT32),
            positions=_bytes(plan.positions, INT32),
            sequence_ids=_bytes(plan.sequence_ids, UINT64),
            seq_lens=_bytes(plan.seq_lens, INT32),
            query_lens=_bytes(plan.query_lens, INT32),
            block_tables=[_encode_tables(tables) for tables in plan.block_tables],
            sample_index=_bytes(plan.sample_index, INT32),
            sample_sequence=_bytes(plan.sample_sequence, INT32),
            sampling=_encode_sampling(plan.sampling),
            block_ops=[
                worker_pb2.BlockOp(kind=COPY, source_block=source, target_block=target)
                for source, target in plan.block_copies.tolist()
            ],
            defer_sampling=plan.defer_sampling,
            score_index=_bytes(plan.score_index, INT32),
            score_token_ids=_bytes(plan.score_token_ids, INT32),
            score_num_tops=_bytes(plan.score_num_tops, INT32),
        ),
    )
    return bytes(request.SerializeToString())


def encode_sampler_inputs(inputs: SamplerInputs) -> bytes:
    """What follows a serialized StepRequest to rank 0; nothing where no row needs any."""
    if inputs is no_inputs():
        return b""
    biases, words, history = inputs.biases, inputs.bad_words, inputs.history
    message = worker_pb2.SamplerInputs(
        biases=worker_pb2.TokenBiases(
            rows=_bytes(biases.rows, INT32),
            token_ids=_bytes(biases.token_ids, INT32),
            values=_bytes(biases.values, FLOAT32),
        ),
        masks=_encode_masks(inputs.masks),
        bad_words=worker_pb2.BadWords(
            rows=_bytes(words.rows, INT32),
            lengths=_bytes(words.lengths, INT32),
            token_ids=_bytes(words.token_ids, INT32),
        ),
        history=worker_pb2.TokenHistory(
            rows=_bytes(history.rows, INT32),
            lengths=_bytes(history.lengths, INT32),
            num_prompt_tokens=_bytes(history.num_prompt_tokens, INT32),
            token_ids=_bytes(history.token_ids, INT32),
        ),
    )
    return bytes(worker_pb2.StepRequest(sampler_inputs=message).SerializeToString())


def encode_masks(masks: TokenMasks, *, epoch: int, step_id: int) -> bytes:
    """A serialized StepRequest that samples what `step_id` has deferred."""
    sample = worker_pb2.SampleStep(masks=_encode_masks(masks))
    request = worker_pb2.StepRequest(epoch=epoch, step_id=step_id, sample=sample)
    return bytes(request.SerializeToString())


def decode_timings(replies: Sequence[worker_pb2.StepReply]) -> tuple[RankSummary, ...]:
    """What the ranks say of their step, in their order."""
    return tuple(
        RankSummary(
            rank,
            reply.timings.prepare_us / US_PER_S,
            reply.timings.forward_us / US_PER_S,
            reply.timings.sample_us / US_PER_S,
        )
        for rank, reply in enumerate(replies)
    )


def decode_result(reply: worker_pb2.StepReply, execution: Execution | None = None) -> StepResult:
    """Rank 0's tokens, in the order of the wire; `execution` is known from elsewhere.

    Raises ValueError: the arrays don't fit together, a row has not one token, or there is no such
    row or fault; the message names the numbers.
    """
    result = reply.result
    sequence_ids = np.frombuffer(result.sequence_ids, UINT64)
    num_tokens = np.frombuffer(result.num_tokens, INT32)
    token_ids = np.frombuffer(result.token_ids, INT32)
    for name, values in (("num_tokens", num_tokens), ("token_ids", token_ids)):
        if len(values) != len(sequence_ids):
            raise ValueError(
                f"{name} has {len(values)} values, sequence_ids has {len(sequence_ids)}: "
                "must be equal"
            )
    other = num_tokens[num_tokens != 1]
    if len(other):
        raise ValueError(f"num_tokens has {other[0]}: must be 1, a row is sampled once")
    return StepResult(
        step_id=reply.step_id,
        sequence_ids=sequence_ids.tolist(),
        token_ids=token_ids.tolist(),
        faults=_decode_faults(result, len(sequence_ids)),
        logprobs=dict(_decode_logprobs("logprobs", result.logprobs, len(sequence_ids))),
        scores=[each for _, each in _decode_logprobs("scores", result.scores, None)],
        execution=execution,
    )


def _encode_tables(tables: BlockTables) -> worker_pb2.BlockTables:
    return worker_pb2.BlockTables(
        num_blocks=_bytes(tables.num_blocks, INT32),
        first_blocks=_bytes(tables.first_blocks, INT32),
        block_ids=_bytes(tables.block_ids, INT32),
    )


def _encode_sampling(columns: SamplingColumns) -> worker_pb2.SamplingColumns:
    return worker_pb2.SamplingColumns(
        temperature=_bytes(columns.temperature, FLOAT32),
        top_k=_bytes(columns.top_k, INT32),
        top_p=_bytes(columns.top_p, FLOAT32),
        seed=_bytes(columns.seed, UINT64),
        min_length=_bytes(columns.min_length, INT32),
        min_p=_bytes(columns.min_p, FLOAT32),
        presence_penalty=_bytes(columns.presence_penalty, FLOAT32),
        frequency_penalty=_bytes(columns.frequency_penalty, FLOAT32),
        repetition_penalty=_bytes(columns.repetition_penalty, FLOAT32),
        num_logprobs=_bytes(columns.num_logprobs, INT32),
    )


def _encode_masks(masks: TokenMasks) -> worker_pb2.TokenMasks:
    return worker_pb2.TokenMasks(
        rows=_bytes(masks.rows, INT32),
        kinds=masks.kinds.tobytes(),
        num_words=_bytes(masks.num_words, INT32),
        words=_bytes(masks.words, UINT32),
    )


def _decode_faults(result: worker_pb2.StepResult, num_rows: int) -> dict[int, Fault]:
    rows = np.frombuffer(result.fault_rows, INT32).tolist()
    if len(rows) != len(result.faults):
        raise ValueError(f"fault_rows has {len(rows)} values, faults has {len(result.faults)}")
    for row in rows:
        if not 0 <= row < num_rows:
            raise ValueError(f"fault_rows has {row}: must be in [0, {num_rows})")
    return {row: Fault(fault) for row, fault in zip(rows, result.faults, strict=True)}


def _decode_logprobs(
    name: str, message: worker_pb2.Logprobs, num_rows: int | None
) -> list[tuple[int, TokenLogprobs]]:
    """Entries with their rows, which are below `num_rows`, or all of them in order if None."""
    rows = np.frombuffer(message.rows, INT32).tolist()
    logprobs = np.frombuffer(message.logprobs, FLOAT32).tolist()
    num_tops = np.frombuffer(message.num_tops, INT32).tolist()
    top_ids = np.frombuffer(message.top_token_ids, INT32).tolist()
    top_logprobs = np.frombuffer(message.top_logprobs, FLOAT32).tolist()
    lengths = (len(rows), len(logprobs), len(num_tops))
    if len(set(lengths)) > 1:
        raise ValueError(f"{name} has {lengths} rows, logprobs, num_tops: must be equal")
    total = (sum(num_tops), len(top_ids), len(top_logprobs))
    if len(set(total)) > 1 or min(num_tops, default=0) < 0:
        raise ValueError(f"{name}: num_tops sum to {total[0]}, there are {total[1:]} of them")
    if num_rows is None:
        fits = rows == list(range(len(rows)))
    else:
        fits = all(0 <= row < num_rows for row in rows) and len(set(rows)) == len(rows)
    if not fits:
        raise ValueError(f"{name}.rows has {rows}: must be those of the plan, each once")
    entries = []
    start = 0
    for row, logprob, count in zip(rows, logprobs, num_tops, strict=True):
        end = start + count
        tops = tuple(top_ids[start:end]), tuple(top_logprobs[start:end])
        entries.append((row, TokenLogprobs(logprob, *tops)))
        start = end
    return entries


def _bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()
