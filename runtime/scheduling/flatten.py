"""Turns the scheduler's decision into arrays: all scheduled tokens end to end, without padding."""

from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.scheduling.group_tables import (
    GroupTables,
    LazyTables,
    changes_since,
    extents_of,
    find_changed,
    no_extents,
)
from runtime.scheduling.output import ScheduledSequence, SchedulerOutput, TableChange
from runtime.scheduling.sampler_inputs import Int32, no_inputs
from runtime.scheduling.sampler_rows import SamplerRows
from runtime.scheduling.sampling_records import SamplingRecords
from runtime.scheduling.scored_rows import find_scored
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import (
    Rows,
    SamplingColumns,
    StepDelta,
    StepPlan,
    TableChanges,
    TokenReferences,
    Uint64,
    no_references,
)

# Steps from one delta that repeats all rows to the next.
KEYFRAME_INTERVAL = 256
NONE_SCORED = np.zeros(0, np.int32)


class _RowEvents(NamedTuple):
    """How rows change in a step, as StepDelta has it."""

    removed: Rows
    added: Rows
    added_ids: Uint64
    added_sampling: SamplingColumns
    changed: Rows
    table_changes: tuple[TableChanges, ...]


class BatchTable:
    """What stays the same from step to step for the sequences that hold blocks, a row each.

    Block tables and sampling parameters are resident: row events change them, and a step gathers
    its rows from them.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        num_groups: int,
        vocab_size: int,
        keyframe_interval: int = KEYFRAME_INTERVAL,
    ) -> None:
        self._keyframe_interval = keyframe_interval
        self._row_of: dict[int, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._groups = [GroupTables(max_num_seqs) for _ in range(num_groups)]
        self._tables = LazyTables(self._groups, _rows([]))  # of the last step
        self._records = SamplingRecords(max_num_seqs)
        self._sampler_rows = SamplerRows(vocab_size)
        # Of the last step, in the order of its samples: steady, and caught up with it.
        self._sampled: tuple[tuple[Sequence, ...], list[Sequence]] = ((), [])
        # Of the steady sequences, as long as they stay the same.
        self._steady: tuple[Sequence, ...] = ()
        self._steady_rows = _rows([])
        self._steady_ids = np.zeros(0, np.uint64)
        self._steady_lens = np.zeros(0, np.int32)  # in the last step
        self._steady_columns, self._steady_defers = self._read(self._steady_rows, self._steady_rows)

    def flatten(self, output: SchedulerOutput) -> StepPlan:
        """Applies the row events of `output` and lays out its step."""
        self._tables.expire()
        is_keyframe = (output.step_id - 1) % self._keyframe_interval == 0
        events = self._apply(output)
        left, joined = self._follow_steady(output.steady)
        if is_keyframe:
            events, left, joined = self._repeat(), _rows([]), self._steady_rows
        behind = output.scheduled
        num_steady = len(output.steady)
        if output.awaited_step_id is None:
            last_tokens = np.fromiter(
                (each.token_ids[-1] for each in output.steady), np.int32, count=num_steady
            )
        else:
            last_tokens = np.zeros(num_steady, np.int32)
        ids = [each.sequence.sequence_id for each in behind]
        rows = _rows([self._row_of[sequence_id] for sequence_id in ids])
        samples = np.array([each.samples for each in behind], np.bool_)
        delta = StepDelta(
            is_keyframe=is_keyframe,
            **events._asdict(),
            left=left,
            joined=joined,
            joined_seq_lens=self._steady_lens[num_steady - len(joined) :].copy(),
            num_steady=num_steady,
            rows=rows,
            samples=samples,
        )
        if not behind:
            every = np.arange(num_steady, dtype=np.int32)
            return self._plan(
                output,
                delta,
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
        ends = np.cumsum(counts, dtype=np.int32)
        every = np.arange(num_steady, dtype=np.int32)
        offsets = np.repeat(computed - (ends - counts), counts)
        return self._plan(
            output,
            delta,
            rows=_join(self._steady_rows, rows),
            sequence_ids=_join(self._steady_ids, np.array(ids, np.uint64)),
            seq_lens=_join(self._steady_lens, computed),
            query_lens=_join(np.ones(num_steady, np.int32), counts),
            input_ids=_join(last_tokens, *map(_tokens_of, behind)),
            positions=_join(self._steady_lens, np.arange(ends[-1], dtype=np.int32) + offsets),
            sample_index=_join(every, ends[samples] - 1 + num_steady),
            sample_sequence=_join(every, np.flatnonzero(samples).astype(np.int32) + num_steady),
            **find_scored(zip(behind, (ends - counts + num_steady).tolist(), strict=True)),
        )

    def _plan(
        self, output: SchedulerOutput, delta: StepDelta, *, rows: Rows, **arrays: NDArray[Any]
    ) -> StepPlan:
        caught_up = [each.sequence for each in output.scheduled if each.samples]
        if output.scheduled:
            columns, defers = self._read(rows, arrays["sample_sequence"])
        else:
            columns, defers = self._steady_columns, self._steady_defers
        references = self._refer(output)
        needs = self._sampler_rows.find(chain(output.steady, caught_up))
        # What comes later may be more: masks of structures, and what unknown tokens bring.
        defers = defers or (output.awaited_step_id is not None and needs.look_back)
        self._sampled = (output.steady, caught_up)
        self._tables = LazyTables(self._groups, rows)
        return StepPlan(
            step_id=output.step_id,
            block_tables=self._tables,
            sampling=columns,
            sampler_inputs=no_inputs() if defers else needs.gather(),
            defer_sampling=defers,
            late_inputs=needs if defers else None,
            block_copies=np.array(output.copies, np.int32).reshape(-1, 2),
            token_references=references,
            delta=delta,
            **arrays,
        )

    def _refer(self, output: SchedulerOutput) -> TokenReferences:
        """What the steady ones feed, which are the first rows of T, if the step before samples it.

        They all were in that step.
        """
        step_id = output.awaited_step_id
        if step_id is None or not output.steady:
            return no_references()
        steady, caught_up = self._sampled
        rows = np.arange(len(output.steady), dtype=np.int32)
        samples = rows
        if steady is not output.steady:
            places = {each.sequence_id: row for row, each in enumerate(chain(steady, caught_up))}
            samples = np.array([places[each.sequence_id] for each in output.steady], np.int32)
        step_ids = np.full(len(rows), step_id, np.uint64)
        return TokenReferences(rows=rows, step_ids=step_ids, sample_rows=samples)

    def _read(self, rows: Rows, sampled: NDArray[Any]) -> tuple[SamplingColumns, bool]:
        """The parameters of rows, and whether one of those that are `sampled` has a structure."""
        defers = bool(self._records.have_structure(rows[sampled]).any())
        return self._records.gather(rows), defers

    def _follow_steady(self, steady: tuple[Sequence, ...]) -> tuple[Rows, Rows]:
        """Returns the rows of who left and of who joined, at the end."""
        if steady is self._steady:
            self._steady_lens += 1  # each of them has fed one token
            return _rows([]), _rows([])
        before, before_ids = self._steady_rows, self._steady_ids
        before_lens = self._steady_lens
        self._steady = steady
        ids = [each.sequence_id for each in steady]
        self._steady_ids = np.array(ids, np.uint64)
        self._steady_rows = _rows([self._row_of[sequence_id] for sequence_id in ids])
        # A step that is decided counts as computed.
        self._steady_lens = np.array([each.num_computed_tokens - 1 for each in steady], np.int32)
        every = np.arange(len(steady))
        self._steady_columns, self._steady_defers = self._read(self._steady_rows, every)
        kept = np.isin(before_ids, self._steady_ids, assume_unique=True)
        first = int(kept.sum())
        if (
            np.array_equal(before_ids[kept], self._steady_ids[:first])
            and np.array_equal(before[kept], self._steady_rows[:first])
            and np.array_equal(before_lens[kept] + 1, self._steady_lens[:first])
        ):
            return before[~kept], self._steady_rows[first:]
        return before, self._steady_rows

    def _apply(self, output: SchedulerOutput) -> _RowEvents:
        removed = _rows([self._remove(sequence_id) for sequence_id in output.removed])
        added = _rows([self._add(sequence) for sequence in output.added])
        changed = _rows(
            [self._row_of[each] for each in dict.fromkeys(each[0] for each in output.changed)]
        )
        before = extents_of(self._groups, changed)
        for change in output.changed:
            self._change(change)
        moved = find_changed(self._groups, changed, before)
        return _RowEvents(
            removed=removed,
            added=added,
            added_ids=np.array([each.sequence_id for each in output.added], np.uint64),
            added_sampling=self._records.gather(added),
            changed=changed[moved],
            table_changes=changes_since(
                self._groups, changed[moved], [each.take(moved) for each in before]
            ),
        )

    def _repeat(self) -> _RowEvents:
        """As if all sequences that hold blocks had come in this step."""
        rows = _rows(list(self._row_of.values()))
        nothing = no_extents(self._groups, rows)
        return _RowEvents(
            removed=_rows([]),
            added=rows,
            added_ids=np.array(list(self._row_of), np.uint64),
            added_sampling=self._records.gather(rows),
            changed=rows,
            table_changes=changes_since(self._groups, rows, nothing),
        )

    def _remove(self, sequence_id: int) -> int:
        row = self._row_of.pop(sequence_id)
        self._free_rows.append(row)
        self._sampler_rows.remove(sequence_id)
        return row

    def _change(self, change: TableChange) -> None:
        row = self._row_of[change.sequence_id]
        for group, first, appended in zip(
            self._groups, change.first_blocks, change.appended, strict=True
        ):
            group.change(row, first, appended)

    def _add(self, sequence: Sequence) -> int:
        row = self._row_of[sequence.sequence_id] = self._free_rows.pop()
        for group in self._groups:
            group.clear(row)
        self._sampler_rows.add(sequence)
        self._records.put(row, sequence)
        return row


def _tokens_of(each: ScheduledSequence) -> Int32:
    start = each.num_computed_tokens
    tokens = each.sequence.token_ids[start : start + each.num_scheduled_tokens]
    return np.frombuffer(tokens, np.int32)


def _rows(values: list[int]) -> Rows:
    return np.array(values, np.intp)


def _join(*arrays: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate(arrays)
