"""The block tables of one cache group as they last from step to step, a row for each sequence."""

import numpy as np
import torch
from numpy.typing import NDArray

from workers.arrays import Int32
from workers.batch import BlockTables

Rows = NDArray[np.intp]

FIRST_ROWS = 64
FIRST_WIDTH = 64


class ResidentTables:
    """A block stands in the column of its place in its sequence; past the last one there are 0s."""

    def __init__(self) -> None:
        self._block_ids = np.zeros((FIRST_ROWS, FIRST_WIDTH), np.int32)
        self.starts = np.zeros(FIRST_ROWS, np.int32)
        self.ends = np.zeros(FIRST_ROWS, np.int32)

    def clear(self, rows: Rows) -> None:
        """Of sequences that hold nothing yet. Makes room for rows that are new."""
        self._reserve(int(rows.max(initial=0)) + 1, self._block_ids.shape[1])
        self._block_ids[rows, : self.ends[rows].max(initial=0)] = 0
        self.starts[rows] = self.ends[rows] = 0

    def change(self, rows: Rows, firsts: Int32, counts: Int32, block_ids: Int32) -> None:
        """Tables begin at `firsts` now, and get `counts` blocks, which come end to end."""
        begins = np.maximum(self.ends[rows], firsts)
        ends = np.where(counts > 0, begins + counts, self.ends[rows])
        # One column more: who reads past an end finds a 0.
        self._reserve(0, int(ends.max(initial=0)) + 1)
        shifts = rows * self._block_ids.shape[1] + begins - (np.cumsum(counts) - counts)
        places = np.repeat(shifts, counts) + np.arange(len(block_ids))
        self._block_ids.ravel()[places] = block_ids
        self.starts[rows] = firsts
        self.ends[rows] = ends

    def gather(self, rows: Rows) -> BlockTables:
        """A copy: later steps change what is here."""
        starts = self.starts[rows]
        width = int((self.ends[rows] - starts).max())
        if starts.any():
            columns = starts[:, None] + np.arange(width, dtype=np.int32)
            np.minimum(columns, self._block_ids.shape[1] - 1, out=columns)
            block_ids = self._block_ids[rows[:, None], columns]
        else:
            block_ids = self._block_ids[rows, :width]
        return BlockTables(
            block_ids=torch.from_numpy(block_ids), first_blocks=torch.from_numpy(starts)
        )

    def _reserve(self, num_rows: int, width: int) -> None:
        rows, columns = self._block_ids.shape
        if num_rows <= rows and width <= columns:
            return
        more = max(rows, _doubled(rows, num_rows)), max(columns, _doubled(columns, width))
        wider = np.zeros(more, np.int32)
        wider[:rows, :columns] = self._block_ids
        self._block_ids = wider
        self.starts = np.pad(self.starts, (0, more[0] - rows))
        self.ends = np.pad(self.ends, (0, more[0] - rows))


def _doubled(count: int, wanted: int) -> int:
    while count < wanted:
        count *= 2
    return count
