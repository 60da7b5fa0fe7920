"""The blocks that one sequence holds, and what of them another may start with."""

from typing import NamedTuple

from runtime.scheduling.cache_layout import CacheLayout
from runtime.scheduling.prefix_cache import Node


class CachedPrefix(NamedTuple):
    """What of a sequence is in the cache already."""

    num_tokens: int
    nodes: list[Node]  # of the first full blocks
    firsts: list[int]  # by group: place of the first block in `shared`
    shared: list[list[int]]  # by group
    copied: list[int | None]  # by group: block whose first tokens are this sequence's next


class HeldBlocks:
    """A table for each cache group."""

    __slots__ = ("firsts", "nodes", "slid", "tables")

    def __init__(self, firsts: list[int], tables: list[list[int]], nodes: list[Node]) -> None:
        self.firsts = firsts  # by group: place of the first block in its sequence
        self.tables = tables  # by group
        self.nodes = nodes  # of the first full blocks, as far as others can find them
        # By group: blocks that stood before the table, while steps in flight may use them.
        self.slid: list[list[int]] = [[] for _ in tables]

    def slide(self, group: int, count: int) -> list[int]:
        """The first `count` blocks leave a table."""
        table = self.tables[group]
        blocks = table[:count]
        del table[:count]
        self.firsts[group] += count
        self.slid[group] += blocks
        return blocks

    def lose(self, group: int, count: int) -> None:
        """The first of those that slid out are in no step any more."""
        del self.slid[group][:count]

    def with_slid(self) -> tuple[list[int], list[list[int]]]:
        """`firsts` and `tables`, with what isn't lost yet."""
        if not any(self.slid):
            return self.firsts, self.tables
        firsts = [first - len(gone) for first, gone in zip(self.firsts, self.slid, strict=True)]
        return firsts, [gone + table for gone, table in zip(self.slid, self.tables, strict=True)]

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence that the tables reach, those that were given back included."""
        return min(
            first + len(table) for first, table in zip(self.firsts, self.tables, strict=True)
        )

    def prefix(self, num_tokens: int, layout: CacheLayout) -> CachedPrefix | None:
        """The first `num_tokens`, for another sequence; None if some of them were given back."""
        firsts = layout.first_blocks(num_tokens)
        if any(first < mine for first, mine in zip(firsts, self.firsts, strict=True)):
            return None
        count, rest = divmod(num_tokens, layout.block_size)
        parts = [
            table[first - mine : count - mine]
            for table, first, mine in zip(self.tables, firsts, self.firsts, strict=True)
        ]
        copied = [
            table[count - mine] if rest else None
            for table, mine in zip(self.tables, self.firsts, strict=True)
        ]
        return CachedPrefix(num_tokens, self.nodes[:count], firsts, parts, copied)

    def tail_first(self) -> list[int]:
        """All blocks, in the order in which they should be evicted.

        A prefix is shared by more sequences than its tail, so the tail goes first. Place by place:
        what is left of a table alone, without the other groups', is no prefix.
        """
        if len(self.tables) == 1:
            return self.tables[0][::-1]
        parts = list(zip(self.firsts, self.tables, strict=True))
        end = max(first + len(table) for first, table in parts)
        return [
            table[place - first]
            for place in range(end - 1, -1, -1)
            for first, table in parts
            if first <= place < first + len(table)
        ]
