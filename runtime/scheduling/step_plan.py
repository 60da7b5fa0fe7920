"""One step, flattened: all scheduled tokens end to end, without padding.

The driver's side of the wire's StepPlan.

T tokens, S sequences, R sampled rows, P scored rows, G cache groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.request import RankSummary, TokenLogprobs
from runtime.scheduling.sampler_inputs import Float32, Int32, SamplerInputs

Uint64 = NDArray[np.uint64]
Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTables:
    """The block tables of one cache group, end to end."""

    num_blocks: Int32  # [S] blocks of each sequence that are sent
    first_blocks: Int32  # [S] place of the first of them; no token sees those before it
    block_ids: Int32  # [sum(num_blocks)] in the order of their tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """One value per sequence."""

    temperature: Float32  # [S] 0 is greedy
    top_k: Int32  # [S] 0 keeps all
    top_p: Float32  # [S]
    seed: Uint64  # [S]
    min_p: Float32  # [S] 0 keeps all
    min_length: Int32  # [S] a token at a position below it is no end-of-sequence token
    presence_penalty: Float32  # [S] 0 changes nothing
    frequency_penalty: Float32  # [S] 0 changes nothing
    repetition_penalty: Float32  # [S] 1 changes nothing
    num_logprobs: Int32  # [S] most probable tokens to tell beside the sampled one; -1: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReferences:
    """Tokens fed that steps in flight sample: row `rows[i]` of T is sample `sample_rows[i]`."""

    rows: Int32  # [K] rising
    step_ids: Uint64  # [K]
    sample_rows: Int32  # [K] index into the R of that step


@cache
def no_references() -> TokenReferences:
    """For a step whose tokens are all known."""
    ints = np.zeros(0, np.int32)
    return TokenReferences(rows=ints, step_ids=np.zeros(0, np.uint64), sample_rows=ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableChanges:
    """How the block tables of one cache group change, of C rows."""

    moves: bool  # whether one of first_blocks isn't as before
    first_blocks: Int32  # [C] place of the first block that is left
    num_blocks: Int32  # [C] blocks put at the end
    block_ids: Int32  # [sum(num_blocks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDelta:
    """A step as the difference to the one before it.

    Rows are places in the table of sequences that hold blocks. The plan's sequences are the steady
    ones, which feed one token each and are sampled, and then B others.
    """

    is_keyframe: bool  # all rows and the step before are forgotten first
    removed: Rows  # [N]
    added: Rows  # [A] free, once `removed` are
    added_ids: Uint64  # [A]
    added_sampling: SamplingColumns  # [A]
    changed: Rows  # [C] whose block tables change
    table_changes: tuple[TableChanges, ...]  # [G]
    left: Rows  # [L] not steady any more
    joined: Rows  # [J] now the last of the steady ones, to whose lengths 1 was added
    joined_seq_lens: Int32  # [J]
    num_steady: int
    rows: Rows  # [B]
    samples: NDArray[np.bool_]  # [B] whether the last token fed is sampled


class LateInputs(Protocol):
    """What sampling needs, once the tokens before it are known."""

    def gather(self) -> SamplerInputs: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What every rank runs in one step."""

    step_id: int
    input_ids: Int32  # [T] 0 where there is a reference instead
    positions: Int32  # [T] index of each token in its own sequence
    sequence_ids: Uint64  # [S]
    seq_lens: Int32  # [S] tokens in the cache before the step
    query_lens: Int32  # [S] tokens fed; they sum to T
    block_tables: Sequence[BlockTables]  # [G] maybe gathered only when somebody looks
    sample_index: Int32  # [R] rows of T whose next token is sampled
    sample_sequence: Int32  # [R] index into S
    sampling: SamplingColumns
    sampler_inputs: SamplerInputs  # none where sampling is deferred
    defer_sampling: bool  # sample once what it needs is there, which comes after the plan
    score_index: Int32  # [P] rows of T for whose logits the logprob of a known token is wanted
    score_token_ids: Int32  # [P] that token
    score_num_tops: Int32  # [P] most probable tokens to tell beside it
    block_copies: Int32  # [K, 2] source and target block, copied in this order before the step
    token_references: TokenReferences = field(default_factory=no_references)
    late_inputs: LateInputs | None = field(default=None, compare=False)  # of deferred sampling
    delta: StepDelta | None = field(default=None, compare=False)  # where the steps before are known

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepPlan):
            return NotImplemented
        return _equal(self, other)


class Fault(IntEnum):
    """Why a row couldn't be sampled; the numbers are those of the wire."""

    INVALID_LOGITS = 1  # NaN, or infinite
    EMPTY_SUPPORT = 2  # no token is left


class Execution(NamedTuple):
    """Where the time of a step went."""

    encode_s: float  # making the messages, and reading the replies
    ranks: tuple[RankSummary, ...]  # in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Rank 0's tokens, one for each sampled row of the plan, in its order."""

    step_id: int
    sequence_ids: list[int]  # [R]
    token_ids: list[int]  # [R]; no token where the row has a fault
    faults: dict[int, Fault] = field(default_factory=dict)  # by row
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row, where wanted
    scores: list[TokenLogprobs] = field(default_factory=list)  # [P]
    execution: Execution | None = None  # where the executor tells


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, Sequence):
        return len(one) == len(other) and all(map(_equal, one, other))
    if is_dataclass(one):
        names = [each.name for each in fields(one) if each.compare]
        return all(_equal(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)
