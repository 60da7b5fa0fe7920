"""The blocks of the KV cache: who is free, who is held how often, who keeps a prefix."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable


class BlockPool:
    """`num_blocks` blocks with reference counts, and the free ones in the order of their use.

    Free blocks that keep a prefix are handed out last, the one freed longest ago first; `evict` is
    called with those that are about to be handed out.
    """

    def __init__(self, num_blocks: int, evict: Callable[[list[int]], None]) -> None:
        self.num_blocks = num_blocks
        self._evict = evict
        self._empty = list(reversed(range(num_blocks)))
        # Free blocks that keep a prefix: the last of the first, then the first of the second goes.
        self._cached_first: dict[int, None] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._keeps: set[int] = set()  # free or not
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._empty) + self.num_cached

    @property
    def num_cached(self) -> int:
        """Free blocks that keep a prefix."""
        return len(self._cached_first) + len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` free blocks; None if fewer are free, and then the pool is unchanged."""
        empty = self._empty
        start = len(empty) - count
        if start >= 0:
            blocks = empty[start:]
            del empty[start:]
        elif count <= self.num_free:
            blocks = empty + self._evict_cached(-start)
            self._empty = []
        else:
            return None
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def keep(self, blocks: Iterable[int]) -> None:
        """The content of these blocks has become prefixes that others may share."""
        self._keeps.update(blocks)

    def num_idle(self, tables: Iterable[Iterable[int]]) -> int:
        """How many of these are free, so that sharing them takes them from the free ones."""
        counts = self._ref_counts
        return sum([not counts[block] for table in tables for block in table])

    def num_freed(
        self, tables: Collection[Iterable[int]], *, still_held: Iterable[Iterable[int]]
    ) -> int:
        """How many blocks would be free if all of these tables were released, but for some."""
        if not tables:
            return 0
        released = Counter(block for table in tables for block in table)
        kept = {block for table in still_held for block in table}
        return sum(
            self._ref_counts[block] == count and block not in kept
            for block, count in released.items()
        )

    def share(self, blocks: Iterable[int]) -> None:
        """Takes one more reference to each block, which is held or keeps a prefix."""
        for block in blocks:
            if not self._ref_counts[block]:
                del (self._cached if block in self._cached else self._cached_first)[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int], *, evict_first: bool = False) -> None:
        """Gives up one reference to each block; a block without references is free.

        Those that keep a prefix are evicted in this order, after or before those that are free.
        """
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is released more often than held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if block not in self._keeps:
                self._empty.append(block)
                continue
            (self._cached_first if evict_first else self._cached)[block] = None

    def forget(self) -> None:
        """No block keeps a prefix any more."""
        for cached in (self._cached_first, self._cached):
            self._empty.extend(cached)
            cached.clear()
        self._keeps.clear()

    def free_blocks(self) -> tuple[list[int], list[int], list[int]]:
        """The empty ones, and those that keep a prefix: to be evicted first, and after them.

        Each in its order; of a pool of which nobody holds a block that is all.
        """
        return [*self._empty], [*self._cached_first], [*self._cached]

    def set_free_blocks(
        self, empty: Iterable[int], cached_first: Iterable[int], cached: Iterable[int]
    ) -> None:
        """As another pool had them; nobody holds a block."""
        self._empty = list(empty)
        self._cached_first = dict.fromkeys(cached_first)
        self._cached = OrderedDict.fromkeys(cached)
        self._keeps = {*self._cached_first, *self._cached}

    def check_invariants(self, holders: Iterable[Iterable[int]], homes: Iterable[int]) -> None:
        """Asserts that reference counts are what `holders`, all tables, hold, and the rest free.

        `homes` are the blocks that the prefix cache knows.
        """
        held = Counter(block for blocks in holders for block in blocks)
        empty, cached = set(self._empty), {*self._cached_first, *self._cached}
        assert len(cached) == self.num_cached, "a block is to be evicted twice"
        assert len(empty) == len(self._empty), "a block is free twice"
        assert not empty & cached, "a block is empty and keeps a prefix"
        assert set(homes) == self._keeps, "the prefix cache knows other blocks than the pool keeps"
        assert cached == self._keeps - held.keys(), "free blocks that keep a prefix"
        assert not empty & self._keeps, "an empty block keeps a prefix"
        assert len(empty) + len(cached) + len(held) == self.num_blocks, (
            "free + cached free + used blocks are not all blocks"
        )
        for block, count in enumerate(self._ref_counts):
            assert count == held[block], f"block {block}: {count} references, {held[block]} holders"

    def _evict_cached(self, count: int) -> list[int]:
        """The next `count` of the free blocks that keep a prefix, which they lose."""
        first, then = self._cached_first, self._cached
        blocks = [first.popitem()[0] for _ in range(min(count, len(first)))]
        blocks += [then.popitem(last=False)[0] for _ in range(count - len(blocks))]
        self._keeps.difference_update(blocks)
        self._evict(blocks)
        return blocks
