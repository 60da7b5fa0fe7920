"""Between the driver's plans and the wire: StepPlan to bytes, StepReply to StepResult."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import worker_pb2
from runtime.scheduling.step_plan import BlockTables, SamplingColumns, StepPlan, StepResult

INT32 = np.dtype("<i4")
UINT64 = np.dtype("<u8")
FLOAT32 = np.dtype("<f4")


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
        ),
    )
    return bytes(request.SerializeToString())


def decode_result(reply: worker_pb2.StepReply) -> StepResult:
    """Rank 0's tokens by sequence id.

    Raises ValueError: the arrays don't fit together; the message names both numbers.
    """
    result = reply.result
    sequence_ids = np.frombuffer(result.sequence_ids, UINT64)
    num_tokens = np.frombuffer(result.num_tokens, INT32)
    token_ids = np.frombuffer(result.token_ids, INT32)
    if len(num_tokens) != len(sequence_ids):
        raise ValueError(
            f"num_tokens has {len(num_tokens)} values, sequence_ids has {len(sequence_ids)}: "
            "must be equal"
        )
    if (num_tokens < 0).any() or num_tokens.sum(dtype=np.int64) != len(token_ids):
        raise ValueError(
            f"num_tokens sum to {num_tokens.sum()}, token_ids has {len(token_ids)} tokens"
        )
    ends = np.cumsum(num_tokens, dtype=np.int64).tolist()
    starts = [0, *ends]
    tokens = token_ids.tolist()
    return StepResult(
        step_id=reply.step_id,
        token_ids={
            sequence_id: tuple(tokens[start:end])
            for sequence_id, start, end in zip(sequence_ids.tolist(), starts, ends, strict=False)
        },
    )


def _encode_tables(tables: BlockTables) -> worker_pb2.BlockTables:
    return worker_pb2.BlockTables(
        num_blocks=_bytes(tables.num_blocks, INT32), block_ids=_bytes(tables.block_ids, INT32)
    )


def _encode_sampling(columns: SamplingColumns) -> worker_pb2.SamplingColumns:
    return worker_pb2.SamplingColumns(
        temperature=_bytes(columns.temperature, FLOAT32),
        top_k=_bytes(columns.top_k, INT32),
        top_p=_bytes(columns.top_p, FLOAT32),
        seed=_bytes(columns.seed, UINT64),
    )


def _bytes(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()
