"""Turns the scheduler's decision into arrays: all scheduled tokens end to end, without padding."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.scheduling.output import ScheduledSequence, SchedulerOutput, TableChange
from runtime.scheduling.sampler_inputs import Int32
from runtime.scheduling.sampler_rows import SamplerRows
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import BlockTables, SamplingColumns, StepPlan

Rows = NDArray[np.intp]

FIRST_WIDTH = 64
NO_LOGPROBS = -1
# What SamplingColumns has of a sequence, and whether its output must have a structure.
RECORD = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("min_length", np.int32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("num_logprobs", np.int32),
        ("has_structure", np.bool_),
    ],
    align=True,
)
NONE_SCORED = np.zeros(0, np.int32)


class _GroupTables:
    """The block tables of one cache group, a row for each sequence that holds blocks."""

    def __init__(self, max_num_seqs: int) -> None:
        self._block_ids = np.zeros((max_num_seqs, FIRST_WIDTH), np.int32)
        self._starts = np.zeros(max_num_seqs, np.int32)  # column of the first block
        self._ends = np.zeros(max_num_seqs, np.int32)

    def clear(self, row: int) -> None:
        self._starts[row] = self._ends[row] = 0

    def change(self, row: int, first: int, appended: list[int]) -> None:
        self._starts[row] = first
        if not appended:
            return
        start = max(int(self._ends[row]), first)
        end = start + len(appended)
        if end > self._block_ids.shape[1]:
            self._widen(end)
        self._block_ids[row, start:end] = appended
        self._ends[row] = end

    def gather(self, rows: Rows) -> BlockTables:
        starts = self._starts[rows]
        num_blocks = self._ends[rows] - starts
        ends = np.cumsum(num_blocks)
        # Where each row's blocks begin in the flat table, less where they go.
        shifts = rows * self._block_ids.shape[1] + starts - (ends - num_blocks)
        places = np.repeat(shifts, num_blocks) + np.arange(ends[-1])
        return BlockTables(
            num_blocks=num_blocks,
            first_blocks=starts,
            block_ids=self._block_ids.ravel().take(places),
        )

    def _widen(self, num_blocks: int) -> None:
        rows, width = self._block_ids.shape
        wider = np.zeros((rows, max(2 * width, num_blocks)), np.int32)
        wider[:, :width] = self._block_ids
        self._block_ids = wider


class BatchTable:
    """What stays the same from step to step for the sequences that hold blocks, a row each.

    Block tables and sampling parameters are resident: row events change them, and a step gathers
    its rows from them.
    """

    def __init__(self, *, max_num_seqs: int, num_groups: int, vocab_size: int) -> None:
        self._row_of: dict[int, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._groups = [_GroupTables(max_num_seqs) for _ in range(num_groups)]
        self._records = np.zeros(max_num_seqs, RECORD)
        self._sampler_rows = SamplerRows(vocab_size)
        # Of the steady sequences, as long as they stay the same.
        self._steady: tuple[Sequence, ...] = ()
        self._steady_rows: Rows = np.zeros(0, np.intp)
        self._steady_ids = np.zeros(0, np.uint64)
        self._steady_lens = np.zeros(0, np.int32)  # in the last step
        self._steady_columns, self._steady_defers = self._read(self._steady_rows, self._steady_rows)

    def flatten(self, output: SchedulerOutput) -> StepPlan:
        """Applies the row events of `output` and lays out its step."""
        self._apply(output)
        self._follow_steady(output.steady)
        behind = output.scheduled
        num_steady = len(output.steady)
        last_tokens = np.fromiter(
            (each.token_ids[-1] for each in output.steady), np.int32, count=num_steady
        )
        if not behind:
            every = np.arange(num_steady, dtype=np.int32)
            return self._plan(
                output,
                rows=self._steady_rows,
                sequence_ids=self._steady_ids,
                seq_lens=self._steady_lens.copy(),
                query_lens=np.ones(num_steady, np.int32),
                input_ids=last_tokens,
                positions=self._steady_lens.copy(),
                sample_index=every,
                sample_sequence=every,
                score_index=NONE_SCORED,
                score_token_ids=NONE_SCORED,
                score_num_tops=NONE_SCORED,
            )
        computed = np.array([each.num_computed_tokens for each in behind], np.int32)
        counts = np.array([each.num_scheduled_tokens for each in behind], np.int32)
        samples = np.array([each.samples for each in behind], np.bool_)
        ends = np.cumsum(counts, dtype=np.int32)
        ids = [each.sequence.sequence_id for each in behind]
        rows = np.array([self._row_of[sequence_id] for sequence_id in ids], np.intp)
        every = np.arange(num_steady, dtype=np.int32)
        offsets = np.repeat(computed - (ends - counts), counts)
        return self._plan(
            output,
            rows=_join(self._steady_rows, rows),
            sequence_ids=_join(self._steady_ids, np.array(ids, np.uint64)),
            seq_lens=_join(self._steady_lens, computed),
            query_lens=_join(np.ones(num_steady, np.int32), counts),
            input_ids=_join(last_tokens, *map(_tokens_of, behind)),
            positions=_join(self._steady_lens, np.arange(ends[-1], dtype=np.int32) + offsets),
            sample_index=_join(every, ends[samples] - 1 + num_steady),
            sample_sequence=_join(every, np.flatnonzero(samples).astype(np.int32) + num_steady),
            **_scores(zip(behind, (ends - counts + num_steady).tolist(), strict=True)),
        )

    def _plan(self, output: SchedulerOutput, *, rows: Rows, **arrays: NDArray[Any]) -> StepPlan:
        sampled = chain(output.steady, (each.sequence for each in output.scheduled if each.samples))
        if output.scheduled:
            columns, defers = self._read(rows, arrays["sample_sequence"])
        else:
            columns, defers = self._steady_columns, self._steady_defers
        return StepPlan(
            step_id=output.step_id,
            block_tables=tuple(group.gather(rows) for group in self._groups),
            sampling=columns,
            sampler_inputs=self._sampler_rows.gather(sampled),
            defer_sampling=defers,
            block_copies=np.array(output.copies, np.int32).reshape(-1, 2),
            **arrays,
        )

    def _read(self, rows: Rows, sampled: NDArray[Any]) -> tuple[SamplingColumns, bool]:
        """The parameters of rows, and whether one of those that are `sampled` has a structure."""
        records = self._records[rows]
        return _columns_of(records), bool(records["has_structure"][sampled].any())

    def _follow_steady(self, steady: tuple[Sequence, ...]) -> None:
        if steady is self._steady:
            self._steady_lens += 1  # each of them has fed one token
            return
        self._steady = steady
        ids = [each.sequence_id for each in steady]
        self._steady_ids = np.array(ids, np.uint64)
        self._steady_rows = np.array([self._row_of[sequence_id] for sequence_id in ids], np.intp)
        self._steady_lens = np.array([each.num_computed_tokens for each in steady], np.int32)
        every = np.arange(len(steady))
        self._steady_columns, self._steady_defers = self._read(self._steady_rows, every)

    def _apply(self, output: SchedulerOutput) -> None:
        for sequence_id in output.removed:
            self._free_rows.append(self._row_of.pop(sequence_id))
            self._sampler_rows.remove(sequence_id)
        for sequence in output.added:
            self._add(sequence)
        for change in output.changed:
            self._change(change)

    def _change(self, change: TableChange) -> None:
        row = self._row_of[change.sequence_id]
        for group, first, appended in zip(
            self._groups, change.first_blocks, change.appended, strict=True
        ):
            group.change(row, first, appended)

    def _add(self, sequence: Sequence) -> None:
        row = self._row_of[sequence.sequence_id] = self._free_rows.pop()
        for group in self._groups:
            group.clear(row)
        self._sampler_rows.add(sequence)
        params = sequence.params
        self._records[row] = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            sequence.seed,
            sequence.num_prompt_tokens + params.min_tokens if params.min_tokens else 0,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
            NO_LOGPROBS if params.logprobs is None else params.logprobs,
            params.structure is not None,
        )


def _columns_of(records: NDArray[np.void]) -> SamplingColumns:
    return SamplingColumns(
        temperature=records["temperature"],
        top_k=records["top_k"],
        top_p=records["top_p"],
        min_p=records["min_p"],
        seed=records["seed"],
        min_length=records["min_length"],
        presence_penalty=records["presence_penalty"],
        frequency_penalty=records["frequency_penalty"],
        repetition_penalty=records["repetition_penalty"],
        num_logprobs=records["num_logprobs"],
    )


def _scores(parts: Iterable[tuple[ScheduledSequence, int]]) -> dict[str, Int32]:
    """Which rows of T are scored, for which token, with how many others.

    Each part comes with its first row.
    """
    index: list[int] = []
    token_ids: list[int] = []
    num_tops: list[int] = []
    for part, first in parts:
        scored = part.scored
        if scored:
            start = first - part.num_computed_tokens
            index.extend(range(scored.start + start, scored.stop + start))
            token_ids.extend(part.sequence.token_ids[scored.start + 1 : scored.stop + 1])
            num_tops.extend([part.sequence.params.prompt_logprobs or 0] * len(scored))
    return {
        "score_index": np.array(index, np.int32),
        "score_token_ids": np.array(token_ids, np.int32),
        "score_num_tops": np.array(num_tops, np.int32),
    }


def _tokens_of(each: ScheduledSequence) -> Int32:
    start = each.num_computed_tokens
    tokens = each.sequence.token_ids[start : start + each.num_scheduled_tokens]
    return np.frombuffer(tokens, np.int32)


def _join(*arrays: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate(arrays)
