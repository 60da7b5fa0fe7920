"""The block tables of all sequences that hold blocks, and what of them may be shared."""

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Ordered
from functools import partial
from typing import NamedTuple

from runtime.scheduling.block_pool import BlockPool
from runtime.scheduling.cache_layout import CacheLayout
from runtime.scheduling.held_blocks import CachedPrefix, HeldBlocks
from runtime.scheduling.output import BlockCopy, TableChange
from runtime.scheduling.prefix_cache import Hash, Node, PrefixCache, sha256_digest
from runtime.scheduling.returning import ReturningBlocks
from runtime.scheduling.sequence import Sequence


class Admitted(NamedTuple):
    """How an admitted sequence starts."""

    change: TableChange
    copies: tuple[BlockCopy, ...]


class CacheManager:
    """One table per cache group and sequence, over one pool.

    The table of a group with a window or chunks begins where the next token sees: blocks before
    that are given back. What is given back is free once every step that may use it is acknowledged.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        prefix_cache: bool = True,
        root: bytes = b"",
        hash_fn: Hash = sha256_digest,
    ) -> None:
        """`root` is the prefix cache's secret."""
        self.layout = layout
        self.num_table_blocks = 0  # sum over all tables; a shared block counts in each
        # Counts what may let in a sequence that didn't fit: blocks given back or made findable.
        self.version = 0
        self._prefixes = PrefixCache(layout, root=root, hash_fn=hash_fn)
        self.pool = BlockPool(layout.num_blocks, self._prefixes.evict)
        self._caches_prefixes = prefix_cache
        self._held: dict[int, HeldBlocks] = {}
        self._returning = ReturningBlocks()
        self.num_leaving = 0  # sequences that hold nothing, whose blocks steps in flight may use

    @property
    def last_step_id(self) -> int:
        """Of the steps that went to the workers."""
        return self._returning.last_step_id

    def dispatch(self, step_id: int) -> None:
        """A step goes to the workers with the tables as they are."""
        self._returning.last_step_id = step_id

    def acknowledge(self, step_id: int) -> None:
        """A step and those before it have ended: what only they used is free."""
        self._returning.acknowledge(step_id)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Whether a step in flight may have a sequence that doesn't run any more."""
        return sequence.in_flight_until > self._returning.acknowledged_step_id

    def num_missing(self, sequence: Sequence) -> int:
        """Blocks that `extend` would need."""
        held = self._held[sequence.sequence_id]
        return sum(self.layout.missing(held.firsts, held.tables, sequence.num_planned_tokens))

    def num_coming(self, ending: Iterable[Sequence]) -> int:
        """Blocks that are free, or will be when the steps in flight and `ending` have ended."""
        tables = self._returning.tables()
        for each in ending:
            tables.extend(self._held[each.sequence_id].tables)
        return self.pool.num_free + self.pool.num_freed(tables, still_held=())

    def capacity(self, sequence: Sequence) -> int:
        """Tokens that a sequence's tables reach."""
        return self._held[sequence.sequence_id].num_blocks * self.layout.block_size

    def find_prefix(self, sequence: Sequence) -> CachedPrefix:
        """What the sequence it is a fork of, or the prefix cache, has of a sequence's tokens.

        Never the last one: that is computed always.
        """
        prefix = self._shared_prefix(sequence)
        return self._stored_prefix(sequence) if prefix is None else prefix

    def num_free_after(
        self,
        sequence: Sequence,
        prefix: CachedPrefix,
        *,
        without: Collection[Sequence] = (),
        soon: bool = False,
    ) -> int:
        """Free blocks if `without` gave theirs back and `sequence` was admitted; maybe below 0.

        With `soon`, those that are on their way back count as free.
        """
        tables = [table for each in without for table in self._held[each.sequence_id].tables]
        if soon:
            tables += self._returning.tables()
        return (
            self.pool.num_free
            + self.pool.num_freed(tables, still_held=prefix.shared)
            - self.pool.num_idle(prefix.shared)
            - sum(self._missing(sequence, prefix))
        )

    def admit(self, sequence: Sequence, prefix: CachedPrefix, *, spare: int) -> Admitted | None:
        """Gives a sequence blocks for all its tokens, as far as its groups reach.

        Shares those of `prefix`, which was found just now, and sets `num_computed_tokens`. None if
        it would leave fewer than `spare` blocks free: then nothing has changed.
        """
        if self.num_free_after(sequence, prefix) < spare:
            return None
        for table in prefix.shared:
            self.pool.share(table)
        new = self._allocate(self._missing(sequence, prefix))
        assert new is not None, "the room was counted"
        tables = [shared + appended for shared, appended in zip(prefix.shared, new, strict=True)]
        self._held[sequence.sequence_id] = HeldBlocks(prefix.firsts, tables, prefix.nodes)
        self.num_table_blocks += sum(map(len, tables))
        sequence.num_computed_tokens = prefix.num_tokens
        copies = tuple(
            BlockCopy(source, appended[0])
            for source, appended in zip(prefix.copied, new, strict=True)
            if source is not None
        )
        if copies:  # whoever gives these back, the next step reads them
            sources = [each.source for each in copies]
            self.pool.share(sources)
            self._give_back(sources, until=self.last_step_id + 1)
        change = TableChange(sequence.sequence_id, tuple(prefix.firsts), tuple(map(list, tables)))
        return Admitted(change, copies)

    def extend(self, sequence: Sequence) -> TableChange | None:
        """Gives back what no later token sees, then makes room for the planned tokens.

        None if that isn't free: no block was added then.
        """
        held = self._held[sequence.sequence_id]
        self._slide(held, sequence.num_computed_tokens)
        new = self._allocate(
            self.layout.missing(held.firsts, held.tables, sequence.num_planned_tokens)
        )
        if new is None:
            return None
        for table, appended in zip(held.tables, new, strict=True):
            table.extend(appended)
            self.num_table_blocks += len(appended)
        return TableChange(sequence.sequence_id, tuple(held.firsts), new)

    def commit(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Lets others share the full blocks of the prompt that are computed.

        Their step must have ended; it is acknowledged after that.
        """
        held = self._held[sequence.sequence_id]
        self._publish(sequence, held, min(num_computed_tokens, sequence.num_prompt_tokens))

    def free(self, sequence: Sequence) -> None:
        """Gives back all blocks of a sequence, which is in no step after its `in_flight_until`.

        What is full and computed stays findable until its blocks are needed.
        """
        held = self._held.pop(sequence.sequence_id)
        self.num_table_blocks -= sum(map(len, held.tables))
        self.num_leaving += 1
        let_go = partial(self._let_go, sequence, sequence.num_computed_tokens, held)
        self._returning.put(held.tables, sequence.in_flight_until, let_go)

    def clear(self) -> None:
        """Forgets all that the cache holds: the workers have lost it. No sequence holds blocks.

        Steps count from 1 again.
        """
        assert not self._held, "sequences hold blocks"
        for table in self._returning.clear():
            self.pool.release(table)
        self.num_leaving = 0
        self._prefixes.clear()
        self.pool.forget()
        self.version += 1

    def check_invariants(self) -> None:
        tables = [table for held in self._held.values() for table in held.tables]
        assert self.num_table_blocks == sum(map(len, tables))
        tables += self._returning.tables()
        self.pool.check_invariants(tables, self._prefixes.homes)
        self._prefixes.check_invariants()
        for held in self._held.values():
            assert len(held.nodes) <= held.num_blocks, "more is shareable than there is"

    def _missing(self, sequence: Sequence, prefix: CachedPrefix) -> list[int]:
        """By group: blocks that a sequence needs beside those it shares."""
        return self.layout.missing(prefix.firsts, prefix.shared, sequence.num_tokens)

    def _stored_prefix(self, sequence: Sequence) -> CachedPrefix:
        nodes = self._find_nodes(sequence)
        count = len(nodes)
        num_tokens = count * self.layout.block_size
        firsts = self.layout.first_blocks(num_tokens)
        # A prefix that was found holds all of these.
        shared = [
            [block for node in nodes[first:] if (block := node.blocks[group]) is not None]
            for group, first in enumerate(firsts)
        ]
        return CachedPrefix(num_tokens, nodes, firsts, shared, [None] * len(firsts))

    def _shared_prefix(self, sequence: Sequence) -> CachedPrefix | None:
        """All but the last token of the prompt, from the sequence that computed it; if it can."""
        source = sequence.fork_of
        if source is None or sequence.num_output_tokens:
            return None
        held = self._held.get(source.sequence_id)
        num_tokens = sequence.num_prompt_tokens - 1
        if held is None or source.num_computed_tokens < num_tokens:
            return None
        return held.prefix(num_tokens, self.layout)

    def _find_nodes(self, sequence: Sequence) -> list[Node]:
        if not self._caches_prefixes or sequence.awaits_scores:
            return []
        count = (sequence.num_tokens - 1) // self.layout.block_size
        hashes, salt = sequence.block_hashes, sequence.cache_salt
        self._prefixes.hash_blocks(hashes, sequence.token_ids, count, salt)
        return self._prefixes.find(hashes, sequence.token_ids, count, salt)

    def _allocate(self, counts: Ordered[int]) -> tuple[list[int], ...] | None:
        """By group, so many blocks each; None if they are not free: then nothing has changed."""
        blocks = self.pool.allocate(sum(counts))
        if blocks is None:
            return None
        if len(counts) == 1:
            return (blocks,)
        rest = iter(blocks)
        return tuple([next(rest) for _ in range(count)] for count in counts)

    def _slide(self, held: HeldBlocks, num_computed_tokens: int) -> None:
        for group, first in enumerate(self.layout.first_blocks(num_computed_tokens)):
            gone = first - held.firsts[group]
            if gone > 0:
                blocks = held.slide(group, gone)
                self.num_table_blocks -= gone
                lose = partial(held.lose, group, gone)
                # Before all others: a later request needs what is seen at its own end.
                self._give_back(blocks[::-1], until=self.last_step_id, evict_first=True, then=lose)

    def _give_back(
        self,
        blocks: list[int],
        *,
        until: int,
        evict_first: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """In the order in which they are to be evicted, once step `until` is acknowledged."""

        def release() -> None:
            self.version += 1
            self.pool.release(blocks, evict_first=evict_first)
            then()

        self._returning.put([blocks], until, release)

    def _let_go(self, sequence: Sequence, num_computed_tokens: int, held: HeldBlocks) -> None:
        """Gives back what a sequence had, which no step has any more."""
        self.num_leaving -= 1
        # Output is hashed here, once, and not block by block as it comes: nobody asks for the
        # tokens of an answer before the client has seen it. What was computed beyond the tokens
        # that it has got isn't its own.
        self._publish(sequence, held, min(num_computed_tokens, sequence.num_tokens))
        self.version += 1
        self.pool.release(held.tail_first())

    def _publish(self, sequence: Sequence, held: HeldBlocks, num_tokens: int) -> None:
        """Makes the full blocks of the first `num_tokens` tokens findable."""
        count = num_tokens // self.layout.block_size
        if not self._caches_prefixes or count <= len(held.nodes):
            return
        hashes, salt = sequence.block_hashes, sequence.cache_salt
        self._prefixes.hash_blocks(hashes, sequence.token_ids, count, salt)
        # What the next steps don't see any more, another sequence of this prompt may.
        firsts, tables = held.with_slid()
        adopted = self._prefixes.extend(
            held.nodes, hashes, sequence.token_ids, count, salt, tables, firsts
        )
        self.pool.keep(adopted)
        self.version += 1
