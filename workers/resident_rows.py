"""What lasts from step to step of the sequences that hold blocks, a row for each."""

import numpy as np
import torch
from numpy.typing import NDArray

from protos import worker_pb2
from workers.arrays import INT32, UINT16, UINT64, Int32, check_each, check_range, read_array
from workers.batch import BlockTables, SamplingColumns
from workers.codec import StepLimits
from workers.errors import StepError
from workers.resident_tables import ResidentTables, Rows
from workers.sampling_codec import COLUMNS, decode_columns

# As many as there are numbers of rows; what isn't used costs no memory.
MAX_ROWS = 1 << 16
MAX_BLOCKS = 2**31 - 1


class ResidentRows:
    """Ids, sampling parameters and block tables. Everything that comes is checked.

    Raises StepError: the message names the array, and the number in it that is wrong.
    """

    def __init__(self, num_groups: int) -> None:
        self._used = np.zeros(MAX_ROWS, np.bool_)
        self._ids = np.zeros(MAX_ROWS, np.uint64)
        self._columns = {
            name: np.zeros(MAX_ROWS, np.int64 if dtype is UINT64 else dtype)
            for name, dtype, *_ in COLUMNS
        }
        self._tables = [ResidentTables() for _ in range(num_groups)]

    def change(self, delta: worker_pb2.StepDelta, limits: StepLimits) -> Rows:
        """What becomes of rows in a step. Returns those that were added."""
        removed = self.read("removed", delta.removed)
        self._used[removed] = False
        added = self._add(delta)
        changed = self.read("changed", delta.changed)
        if len(delta.table_changes) != len(self._tables):
            raise StepError(
                f"delta.table_changes has {len(delta.table_changes)} entries, the cache has "
                f"{len(self._tables)} groups"
            )
        for group, changes in enumerate(delta.table_changes):
            self._change_tables(group, changed, changes, limits)
        return added

    def read(self, name: str, data: bytes) -> Rows:
        """Rows in use, none of them twice."""
        rows = read_rows(name, data)
        unused = self.find_unused(rows)
        if len(unused):
            raise StepError(f"delta.{name} has row {unused[0]}, which no sequence has")
        return rows

    def find_unused(self, rows: Rows) -> Rows:
        """Those that no sequence has."""
        return rows[~self._used[rows]]

    def ids(self, rows: Rows) -> tuple[int, ...]:
        return tuple(self._ids[rows].tolist())

    def columns(self, rows: Rows) -> SamplingColumns:
        return SamplingColumns(
            **{name: torch.from_numpy(values[rows]) for name, values in self._columns.items()}
        )

    def tables(
        self, rows: Rows, firsts: list[Int32], ends: Int32, block_size: int
    ) -> tuple[BlockTables, ...]:
        """By group. Each sequence reads or writes its blocks from `firsts` [G][S] to `ends` [S]."""
        tables = []
        for group, (table, first) in enumerate(zip(self._tables, firsts, strict=True)):
            name = f"delta: block_tables[{group}]"
            check_each(f"{name}.first_blocks", table.starts[rows], 0, first // block_size)
            check_each(f"{name} ends", table.ends[rows], -(-ends // block_size), MAX_BLOCKS)
            tables.append(table.gather(rows))
        return tuple(tables)

    def _add(self, delta: worker_pb2.StepDelta) -> Rows:
        rows = read_rows("added", delta.added)
        taken = self._used[rows]
        if taken.any():
            raise StepError(f"delta.added has row {rows[taken][0]}, which a sequence has")
        ids = read_array("delta.added_ids", delta.added_ids, UINT64, len(rows), "delta.added")
        if len(rows) == 0:
            return rows
        known = np.concatenate((self._ids[self._used], ids))
        if len(np.unique(known)) != len(known):
            raise StepError("delta.added_ids has an id twice, or one that a row has")
        for name, values in _arrays(decode_columns(delta.added_sampling, len(rows))).items():
            self._columns[name][rows] = values
        self._used[rows] = True
        self._ids[rows] = ids
        for table in self._tables:
            table.clear(rows)
        return rows

    def _change_tables(
        self, group: int, rows: Rows, changes: worker_pb2.TableChanges, limits: StepLimits
    ) -> None:
        name = f"delta.table_changes[{group}]"
        table = self._tables[group]
        count = len(rows)
        if count == 0 and not changes.ByteSize():
            return
        firsts = table.starts[rows]
        if changes.first_blocks:
            data = changes.first_blocks
            firsts = read_array(f"{name}.first_blocks", data, INT32, count, "delta.changed")
        counts = np.ones(count, np.int32)
        if changes.num_blocks:
            data = changes.num_blocks
            counts = read_array(f"{name}.num_blocks", data, INT32, count, "delta.changed")
        most = -(-limits.max_model_len // limits.block_size)
        check_range(f"{name}.num_blocks", counts, 0, most + 1)
        reach = np.where(counts > 0, most - counts, table.ends[rows])
        check_each(f"{name}.first_blocks", firsts, table.starts[rows], reach)
        check_range(f"{name}: blocks of a row", table.ends[rows] + counts, 0, most + 1)
        block_ids = read_array(f"{name}.block_ids", changes.block_ids, INT32)
        total = int(counts.sum(dtype=np.int64))
        if total != len(block_ids):
            raise StepError(
                f"{name}.num_blocks sum to {total}, block_ids has {len(block_ids)} blocks"
            )
        check_range(f"{name}.block_ids", block_ids, 0, limits.num_blocks)
        table.change(rows, firsts, counts, block_ids)


def read_rows(name: str, data: bytes) -> Rows:
    """Rows, none of them twice."""
    rows = read_array(f"delta.{name}", data, UINT16).astype(np.intp)
    if len(rows) > 1 and len(np.unique(rows)) != len(rows):
        raise StepError(f"delta.{name} has {len(rows)} rows, not all different")
    return rows


def _arrays(columns: SamplingColumns) -> dict[str, NDArray[np.generic]]:
    return {name: getattr(columns, name).numpy() for name, *_ in COLUMNS}
