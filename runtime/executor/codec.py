"""Between the driver's plans and the wire: StepPlan to bytes, StepReply to StepResult."""

from collections.abc import Sequence

import numpy as np

from protos import worker_pb2
from runtime.executor.sampler_codec import (
    FLOAT32,
    INT32,
    encode_inputs,
    encode_masks,
    to_bytes,
)
from runtime.request import RankSummary, TokenLogprobs
from runtime.scheduling.sampler_inputs import SamplerInputs, no_inputs
from runtime.scheduling.step_plan import (
    BlockTables,
    Execution,
    Fault,
    SamplingColumns,
    StepDelta,
    StepPlan,
    StepResult,
    TableChanges,
)
from runtime.scheduling.token_masks import TokenMasks

UINT16 = np.dtype("<u2")
UINT64 = np.dtype("<u8")
US_PER_S = 1_000_000

COPY = worker_pb2.BlockOp.KIND_COPY


def encode_step(
    plan: StepPlan, *, epoch: int, return_input_hash: bool, share_samples: bool = False
) -> bytes:
    """A serialized StepRequest with the whole step: the same bytes for every rank."""
    request = worker_pb2.StepRequest(
        epoch=epoch,
        step_id=plan.step_id,
        return_input_hash=return_input_hash,
        share_samples=share_samples,
        plan=_encode_plan(plan),
    )
    return bytes(request.SerializeToString())


def encode_delta(
    plan: StepPlan,
    *,
    epoch: int,
    return_input_hash: bool,
    share_samples: bool = False,
    is_checked: bool = False,
) -> bytes:
    """As encode_step, a plan with a delta: what differs from the step before.

    With `is_checked`, also the whole step, which the ranks compare.
    """
    assert plan.delta is not None, "the plan is of no series"
    request = worker_pb2.StepRequest(
        epoch=epoch,
        step_id=plan.step_id,
        return_input_hash=return_input_hash,
        share_samples=share_samples,
        delta=_encode_delta(plan, plan.delta),
        checked_plan=_encode_plan(plan) if is_checked else None,
    )
    return bytes(request.SerializeToString())


def encode_sampler_inputs(inputs: SamplerInputs) -> bytes:
    """What follows a serialized StepRequest to rank 0; nothing where no row needs any."""
    if inputs is no_inputs():
        return b""
    request = worker_pb2.StepRequest(sampler_inputs=encode_inputs(inputs))
    return bytes(request.SerializeToString())


def encode_sample(inputs: SamplerInputs, masks: TokenMasks, *, epoch: int, step_id: int) -> bytes:
    """A serialized StepRequest that samples what `step_id` has deferred."""
    sample = worker_pb2.SampleStep(masks=encode_masks(masks), sampler_inputs=encode_inputs(inputs))
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


def _encode_plan(plan: StepPlan) -> worker_pb2.StepPlan:
    refer = plan.token_references
    return worker_pb2.StepPlan(
        input_ids=to_bytes(plan.input_ids, INT32),
        positions=to_bytes(plan.positions, INT32),
        sequence_ids=to_bytes(plan.sequence_ids, UINT64),
        seq_lens=to_bytes(plan.seq_lens, INT32),
        query_lens=to_bytes(plan.query_lens, INT32),
        block_tables=[_encode_tables(tables) for tables in plan.block_tables],
        sample_index=to_bytes(plan.sample_index, INT32),
        sample_sequence=to_bytes(plan.sample_sequence, INT32),
        sampling=_encode_sampling(plan.sampling),
        block_ops=_encode_copies(plan),
        token_references=worker_pb2.TokenReferences(
            rows=to_bytes(refer.rows, INT32),
            step_ids=to_bytes(refer.step_ids, UINT64),
            sample_rows=to_bytes(refer.sample_rows, INT32),
        ),
        defer_sampling=plan.defer_sampling,
        score_index=to_bytes(plan.score_index, INT32),
        score_token_ids=to_bytes(plan.score_token_ids, INT32),
        score_num_tops=to_bytes(plan.score_num_tops, INT32),
    )


def _encode_delta(plan: StepPlan, delta: StepDelta) -> worker_pb2.StepDelta:
    steady = delta.num_steady
    # With references none of their tokens is known.
    samples = plan.token_references.sample_rows
    known = plan.input_ids[: 0 if len(samples) else steady]
    return worker_pb2.StepDelta(
        is_keyframe=delta.is_keyframe,
        removed=to_bytes(delta.removed, UINT16),
        added=to_bytes(delta.added, UINT16),
        added_ids=to_bytes(delta.added_ids, UINT64),
        added_sampling=_encode_sampling(delta.added_sampling) if len(delta.added) else None,
        changed=to_bytes(delta.changed, UINT16),
        table_changes=[_encode_changes(each) for each in delta.table_changes],
        left=to_bytes(delta.left, UINT16),
        joined=to_bytes(delta.joined, UINT16),
        joined_seq_lens=to_bytes(delta.joined_seq_lens, INT32),
        steady_ids=to_bytes(known, INT32),
        steady_samples=to_bytes(samples, INT32) if delta.is_keyframe else b"",
        rows=to_bytes(delta.rows, UINT16),
        seq_lens=to_bytes(plan.seq_lens[steady:], INT32),
        query_lens=to_bytes(plan.query_lens[steady:], INT32),
        samples=delta.samples.tobytes(),
        input_ids=to_bytes(plan.input_ids[steady:], INT32),
        block_ops=_encode_copies(plan),
        defer_sampling=plan.defer_sampling,
        score_index=to_bytes(plan.score_index, INT32),
        score_token_ids=to_bytes(plan.score_token_ids, INT32),
        score_num_tops=to_bytes(plan.score_num_tops, INT32),
    )


def _encode_changes(changes: TableChanges) -> worker_pb2.TableChanges:
    firsts, counts = changes.first_blocks, changes.num_blocks
    return worker_pb2.TableChanges(
        first_blocks=to_bytes(firsts, INT32) if changes.moves else b"",
        num_blocks=b"" if (counts == 1).all() else to_bytes(counts, INT32),
        block_ids=to_bytes(changes.block_ids, INT32),
    )


def _encode_copies(plan: StepPlan) -> list[worker_pb2.BlockOp]:
    return [
        worker_pb2.BlockOp(kind=COPY, source_block=source, target_block=target)
        for source, target in plan.block_copies.tolist()
    ]


def _encode_tables(tables: BlockTables) -> worker_pb2.BlockTables:
    return worker_pb2.BlockTables(
        num_blocks=to_bytes(tables.num_blocks, INT32),
        first_blocks=to_bytes(tables.first_blocks, INT32),
        block_ids=to_bytes(tables.block_ids, INT32),
    )


def _encode_sampling(columns: SamplingColumns) -> worker_pb2.SamplingColumns:
    return worker_pb2.SamplingColumns(
        temperature=to_bytes(columns.temperature, FLOAT32),
        top_k=to_bytes(columns.top_k, INT32),
        top_p=to_bytes(columns.top_p, FLOAT32),
        seed=to_bytes(columns.seed, UINT64),
        min_length=to_bytes(columns.min_length, INT32),
        min_p=to_bytes(columns.min_p, FLOAT32),
        presence_penalty=to_bytes(columns.presence_penalty, FLOAT32),
        frequency_penalty=to_bytes(columns.frequency_penalty, FLOAT32),
        repetition_penalty=to_bytes(columns.repetition_penalty, FLOAT32),
        num_logprobs=to_bytes(columns.num_logprobs, INT32),
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
