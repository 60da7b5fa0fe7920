"""One step, flattened: all scheduled tokens end to end, without padding.

The driver's side of the wire's StepPlan.

T tokens, S sequences, R sampled rows, G cache groups.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Uint64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTables:
    """The block tables of one cache group, end to end."""

    num_blocks: Int32  # [S] blocks of each sequence that are sent
    first_blocks: Int32  # [S] place of the first of them; those before it are behind the window
    block_ids: Int32  # [sum(num_blocks)] in the order of their tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """One value per sequence."""

    temperature: Float32  # [S] 0 is greedy
    top_k: Int32  # [S] 0 keeps all
    top_p: Float32  # [S]
    seed: Uint64  # [S]
    min_length: Int32  # [S] a token at a position below it is no end-of-sequence token


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What every rank runs in one step."""

    step_id: int
    input_ids: Int32  # [T]
    positions: Int32  # [T] index of each token in its own sequence
    sequence_ids: Uint64  # [S]
    seq_lens: Int32  # [S] tokens in the cache before the step
    query_lens: Int32  # [S] tokens fed; they sum to T
    block_tables: tuple[BlockTables, ...]  # [G]
    sample_index: Int32  # [R] rows of T whose next token is sampled
    sample_sequence: Int32  # [R] index into S
    sampling: SamplingColumns
    block_copies: Int32  # [K, 2] source and target block, copied in this order before the step

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepPlan):
            return NotImplemented
        return _equal(self, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Rank 0's tokens, one for each sampled row of the plan, in its order."""

    step_id: int
    sequence_ids: list[int]  # [R]
    token_ids: list[int]  # [R]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "__slots__"):
        return all(_equal(getattr(one, name), getattr(other, name)) for name in one.__slots__)
    return bool(one == other)
