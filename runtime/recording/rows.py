"""The rows of plans in short: what follows from the plan before is left out."""

from dataclasses import dataclass

import numpy as np

from protos import recording_pb2
from runtime.recording.arrays import Array, arrays_of, digest_of
from runtime.scheduling.sampler_inputs import Int32
from runtime.scheduling.step_plan import StepPlan, Uint64

INT32 = np.dtype("<i4")
UINT64 = np.dtype("<u8")
# What of a plan goes into which digest; all else into the one of sampling.
TOKENS = ("input_ids", "positions", "sequence_ids", "seq_lens", "query_lens", "token_references")
# They follow from the row events, and are gathered only for who looks.
TABLES = ("block_tables",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Of the arrays of a plan, block tables left out."""

    tokens: bytes
    sampling: bytes

    @classmethod
    def of(cls, plan: StepPlan) -> "Digests":
        tokens: list[tuple[str, Array]] = []
        sampling: list[tuple[str, Array]] = []
        for name, array in arrays_of(plan, leave_out=TABLES):
            (tokens if name.partition(".")[0] in TOKENS else sampling).append((name, array))
        return cls(tokens=digest_of(tokens), sampling=digest_of(sampling))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What each sequence of a step is fed."""

    sequence_ids: Uint64  # [S]
    seq_lens: Int32  # [S] tokens in the cache before the step
    query_lens: Int32  # [S]
    input_ids: Int32  # [T] 0 where steps in flight sample them; all 0 where redacted

    @classmethod
    def of(cls, plan: StepPlan) -> "Rows":
        return cls(
            sequence_ids=plan.sequence_ids,
            seq_lens=plan.seq_lens,
            query_lens=plan.query_lens,
            input_ids=plan.input_ids,
        )

    def tokens(self, row: int) -> list[int]:
        """What one sequence is fed."""
        end = int(self.query_lens[: row + 1].sum())
        tokens: list[int] = self.input_ids[end - int(self.query_lens[row]) : end].tolist()
        return tokens


class RowsWriter:
    """Plans of one file, in their order."""

    def __init__(self, *, redact: bool) -> None:
        self._redact = redact
        self._last: Rows | None = None

    def encode(self, plan: StepPlan, submitted_s: float) -> recording_pb2.Plan:
        rows = Rows.of(plan)
        message = recording_pb2.Plan(
            step_id=plan.step_id,
            num_tokens=len(plan.input_ids),
            num_samples=len(plan.sample_index),
            submitted_s=submitted_s,
        )
        last, self._last = self._last, rows
        is_same = last is not None and np.array_equal(last.sequence_ids, rows.sequence_ids)
        if not is_same:
            message.sequence_ids = rows.sequence_ids.astype(UINT64, copy=False).tobytes()
        if last is None or not (
            is_same and np.array_equal(last.seq_lens + last.query_lens, rows.seq_lens)
        ):
            message.seq_lens = rows.seq_lens.astype(INT32, copy=False).tobytes()
        if (rows.query_lens != 1).any():
            message.query_lens = rows.query_lens.astype(INT32, copy=False).tobytes()
        if not self._redact:
            if rows.input_ids.any():
                message.input_ids = rows.input_ids.astype(INT32, copy=False).tobytes()
            digests = Digests.of(plan)
            message.tokens_digest = digests.tokens
            message.sampling_digest = digests.sampling
        return message


class RowsReader:
    """The other end of RowsWriter, from a file's front."""

    def __init__(self) -> None:
        self._last: Rows | None = None

    def decode(self, message: recording_pb2.Plan) -> Rows:
        """Raises ValueError: the plan before it is missing."""
        last = self._last
        if message.sequence_ids:
            sequence_ids = np.frombuffer(message.sequence_ids, UINT64)
        elif last is not None:
            sequence_ids = last.sequence_ids
        else:
            raise ValueError(f"step {message.step_id} has no sequence_ids, nor a plan before it")
        if message.seq_lens:
            seq_lens = np.frombuffer(message.seq_lens, INT32)
        elif last is not None:
            seq_lens = last.seq_lens + last.query_lens
        else:
            raise ValueError(f"step {message.step_id} has no seq_lens, nor a plan before it")
        if message.query_lens:
            query_lens = np.frombuffer(message.query_lens, INT32)
        else:
            query_lens = np.ones(len(sequence_ids), INT32)
        if message.input_ids:
            input_ids = np.frombuffer(message.input_ids, INT32)
        else:
            input_ids = np.zeros(message.num_tokens, INT32)
        self._last = Rows(
            sequence_ids=sequence_ids,
            seq_lens=seq_lens,
            query_lens=query_lens,
            input_ids=input_ids,
        )
        return self._last
