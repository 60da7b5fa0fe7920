"""The block tables of the sequences that hold blocks, a row for each, and how they change."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from runtime.scheduling.sampler_inputs import Int32
from runtime.scheduling.step_plan import BlockTables, Rows, TableChanges

FIRST_WIDTH = 64


class Extents(NamedTuple):
    """Where the tables of n rows begin and end, in blocks of their sequences."""

    starts: Int32  # [n]
    ends: Int32  # [n]

    def take(self, wanted: NDArray[np.bool_]) -> "Extents":
        return Extents(self.starts[wanted], self.ends[wanted])


class GroupTables:
    """The block tables of one cache group."""

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

    def extents(self, rows: Rows) -> Extents:
        return Extents(self._starts[rows], self._ends[rows])

    def gather(self, rows: Rows) -> BlockTables:
        starts, ends = self.extents(rows)
        return BlockTables(
            num_blocks=ends - starts,
            first_blocks=starts,
            block_ids=self._between(rows, starts, ends),
        )

    def changes(self, rows: Rows, before: Extents) -> TableChanges:
        """What has become of the tables of `rows` since they were `before`."""
        starts, ends = self.extents(rows)
        firsts = np.maximum(before.ends, starts)
        return TableChanges(
            moves=not np.array_equal(starts, before.starts),
            first_blocks=starts,
            num_blocks=ends - firsts,
            block_ids=self._between(rows, firsts, ends),
        )

    def have_changed(self, rows: Rows, before: Extents) -> NDArray[np.bool_]:
        """[n] whether a table isn't as `before`."""
        starts, ends = self.extents(rows)
        changed: NDArray[np.bool_] = (starts != before.starts) | (ends != before.ends)
        return changed

    def _between(self, rows: Rows, starts: Int32, ends: Int32) -> Int32:
        """The blocks of `rows` from `starts` to `ends`, end to end."""
        counts = ends - starts
        sums = np.cumsum(counts)
        # Where each row's blocks begin in the flat table, less where they go.
        shifts = rows * self._block_ids.shape[1] + starts - (sums - counts)
        places = np.repeat(shifts, counts) + np.arange(counts.sum())
        # Not by `take`, which lets other threads have the interpreter, however few they are.
        between: Int32 = self._block_ids.ravel()[places]
        return between

    def _widen(self, num_blocks: int) -> None:
        rows, width = self._block_ids.shape
        wider = np.zeros((rows, max(2 * width, num_blocks)), np.int32)
        wider[:, :width] = self._block_ids
        self._block_ids = wider


class LazyTables(Sequence[BlockTables]):
    """The tables of a step, by group, gathered when somebody looks at them.

    That is to be before they `expire`: then those of a later step are there.
    """

    def __init__(self, groups: Sequence[GroupTables], rows: Rows) -> None:
        self._groups = groups
        self._rows = rows
        self._gathered: tuple[BlockTables, ...] | None = None
        self._has_expired = False

    def expire(self) -> None:
        self._has_expired = True

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, index: int) -> BlockTables: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockTables]: ...
    def __getitem__(self, index: int | slice) -> BlockTables | Sequence[BlockTables]:
        if self._gathered is None:
            assert not self._has_expired, "a later step's tables are there: look earlier"
            self._gathered = tuple(group.gather(self._rows) for group in self._groups)
        return self._gathered[index]


def extents_of(groups: Iterable[GroupTables], rows: Rows) -> list[Extents]:
    return [group.extents(rows) for group in groups]


def no_extents(groups: Iterable[GroupTables], rows: Rows) -> list[Extents]:
    """Of rows that nobody has heard of."""
    zeros = np.zeros(len(rows), np.int32)
    return [Extents(zeros, zeros) for _ in groups]


def find_changed(
    groups: Sequence[GroupTables], rows: Rows, before: Sequence[Extents]
) -> NDArray[np.bool_]:
    """[n] whether a table of one of `rows` isn't as `before`, by group."""
    changed = np.zeros(len(rows), np.bool_)
    for group, extents in zip(groups, before, strict=True):
        changed |= group.have_changed(rows, extents)
    return changed


def changes_since(
    groups: Sequence[GroupTables], rows: Rows, before: Sequence[Extents]
) -> tuple[TableChanges, ...]:
    """By group: what has become of the tables of `rows`."""
    parts = zip(groups, before, strict=True)
    return tuple(group.changes(rows, extents) for group, extents in parts)
