"""Between the driver's plans and the wire: StepPlan to bytes, StepReply to StepResult."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import worker_pb2
from runtime.scheduling.step_plan import BlockTables, SamplingColumns, StepPlan, StepResult

INT32 = np.dtype("<i4")
UINT64 = np.dtype("<u8")
FLOAT32 = np.dtype("<f4")

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
        ),
    )
    return bytes(request.SerializeToString())


def decode_result(reply: worker_pb2.StepReply) -> StepResult:
    """Rank 0's tokens, in the order of the wire.

    Raises ValueError: the arrays don't fit together, or a row has not one token; the message names
    the numbers.
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
    )


def _bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()
