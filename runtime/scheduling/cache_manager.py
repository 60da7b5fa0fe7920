"""The block tables of all sequences that hold blocks."""

from runtime.scheduling.block_pool import BlockPool
from runtime.scheduling.cache_layout import CacheLayout


class CacheManager:
    """One table per cache group and sequence, over one pool."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.pool = BlockPool(layout.num_blocks)
        self._tables: dict[int, tuple[list[int], ...]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds, all groups together."""
        return -(-num_tokens // self.layout.block_size) * len(self.layout.groups)

    def grow(self, sequence_id: int, num_tokens: int) -> tuple[list[int], ...] | None:
        """Makes room for the first `num_tokens` tokens of a sequence.

        Returns the blocks appended to each group's table, or None if they are not free: then
        nothing has changed.
        """
        groups = range(len(self.layout.groups))
        tables = self._tables.get(sequence_id)
        have = len(tables[0]) if tables else 0
        missing = -(-num_tokens // self.layout.block_size) - have
        if missing <= 0:
            return tuple([] for _ in groups)
        blocks = self.pool.allocate(missing * len(groups))
        if blocks is None:
            return None
        appended = tuple(blocks[group * missing : (group + 1) * missing] for group in groups)
        if tables is None:
            tables = self._tables[sequence_id] = tuple([] for _ in groups)
        for table, new in zip(tables, appended, strict=True):
            table.extend(new)
        return appended

    def free(self, sequence_id: int) -> None:
        """Gives back all blocks of a sequence; no step that may write them is in flight."""
        for table in self._tables.pop(sequence_id):
            # Tail first: a prefix is shared by more sequences than its tail, so the tail should be
            # handed out first.
            self.pool.release(reversed(table))

    def check_invariants(self) -> None:
        self.pool.check_invariants(table for tables in self._tables.values() for table in tables)
