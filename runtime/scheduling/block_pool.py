"""The blocks of the KV cache: who is free, who is held how often."""

from collections import Counter, deque
from collections.abc import Iterable


class BlockPool:
    """`num_blocks` blocks with reference counts and a free list, first freed, first handed out."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` free blocks; None if fewer are free, and then the pool is unchanged."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Gives up one reference to each block; a block without references is free."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is released more often than held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def check_invariants(self, holders: Iterable[Iterable[int]]) -> None:
        """Asserts that reference counts are what `holders`, all tables, hold, and the rest free."""
        held = Counter(block for blocks in holders for block in blocks)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free) + len(held) == self.num_blocks, "free + used blocks are not all blocks"
        for block, count in enumerate(self._ref_counts):
            assert count == held[block], f"block {block}: {count} references, {held[block]} holders"
            assert (count == 0) == (block in free), f"block {block}: free and held"
