"""Turns the scheduler's decision into arrays: all scheduled tokens end to end, without padding."""

from itertools import chain

import numpy as np

from runtime.scheduling.output import SchedulerOutput
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import BlockTables, Int32, SamplingColumns, StepPlan


class BatchTable:
    """What stays the same from step to step for the sequences that hold blocks, a row each.

    Block tables and sampling parameters are resident: row events change them, and a step gathers
    its rows from them.
    """

    def __init__(self, *, max_num_seqs: int, num_groups: int) -> None:
        self._row_of: dict[int, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._block_ids = np.zeros((num_groups, max_num_seqs, 64), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)  # the same in every group
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.uint64)

    def flatten(self, output: SchedulerOutput) -> StepPlan:
        """Applies the row events of `output` and lays out its step."""
        self._apply(output)
        scheduled = output.scheduled
        ids = [each.sequence.sequence_id for each in scheduled]
        rows = np.array([self._row_of[sequence_id] for sequence_id in ids], np.intp)
        seq_lens = np.array([each.num_computed_tokens for each in scheduled], np.int32)
        query_lens = np.array([each.num_scheduled_tokens for each in scheduled], np.int32)
        ends = np.cumsum(query_lens, dtype=np.int32)
        num_tokens = int(ends[-1])
        samples = np.array([each.samples for each in scheduled], np.bool_)
        return StepPlan(
            step_id=output.step_id,
            input_ids=np.fromiter(
                chain.from_iterable(
                    each.sequence.token_ids[
                        each.num_computed_tokens : each.num_computed_tokens
                        + each.num_scheduled_tokens
                    ]
                    for each in scheduled
                ),
                np.int32,
                count=num_tokens,
            ),
            positions=np.arange(num_tokens, dtype=np.int32)
            + np.repeat(seq_lens - (ends - query_lens), query_lens),
            sequence_ids=np.array(ids, np.uint64),
            seq_lens=seq_lens,
            query_lens=query_lens,
            block_tables=self._gather_block_tables(rows),
            sample_index=ends[samples] - 1,
            sample_sequence=np.flatnonzero(samples).astype(np.int32),
            sampling=SamplingColumns(
                temperature=self._temperature[rows],
                top_k=self._top_k[rows],
                top_p=self._top_p[rows],
                seed=self._seed[rows],
            ),
        )

    def _apply(self, output: SchedulerOutput) -> None:
        for sequence_id in output.removed:
            self._free_rows.append(self._row_of.pop(sequence_id))
        for sequence in output.added:
            self._add(sequence)
        for event in output.appended:
            row = self._row_of[event.sequence_id]
            start = self._num_blocks[row]
            end = start + len(event.blocks[0])
            if end > self._block_ids.shape[2]:
                self._widen(int(end))
            self._block_ids[:, row, start:end] = event.blocks
            self._num_blocks[row] = end

    def _add(self, sequence: Sequence) -> None:
        row = self._row_of[sequence.sequence_id] = self._free_rows.pop()
        self._num_blocks[row] = 0
        self._temperature[row] = sequence.params.temperature
        self._top_k[row] = sequence.params.top_k
        self._top_p[row] = sequence.params.top_p
        self._seed[row] = sequence.seed

    def _widen(self, num_blocks: int) -> None:
        groups, rows, width = self._block_ids.shape
        wider = np.zeros((groups, rows, max(2 * width, num_blocks)), np.int32)
        wider[:, :, :width] = self._block_ids
        self._block_ids = wider

    def _gather_block_tables(self, rows: np.ndarray) -> tuple[BlockTables, ...]:
        num_blocks: Int32 = self._num_blocks[rows]
        width = int(num_blocks.max())
        used = np.arange(width) < num_blocks[:, None]
        return tuple(
            BlockTables(num_blocks=num_blocks, block_ids=block_ids[rows, :width][used])
            for block_ids in self._block_ids
        )
