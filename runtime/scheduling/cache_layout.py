"""Which layers share a block table, and how many blocks the memory holds."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from runtime.errors import ConfigError

MAX_TOKENS = 2**31 - 1
# What running sequences may use, and three times as much to keep prefixes for later ones.
CACHED_SHARES = 4
# A layer's K and V begin at multiples of so many bytes: kernels load vectors of them.
ALIGNMENT_BYTES = 16
# One more table must save so large a share of the memory: with 256 sequences of 4,096 tokens it
# costs the driver about 0.1 ms in each step.
TABLE_SHARE = 1 / 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCacheSpec:
    """What one attention call of the forward pass keeps in the cache, on one rank.

    Raises ConfigError: it has both a window and a chunk.
    """

    window: int  # tokens a query sees, itself included; 0: all before it
    chunk: int = 0  # a query sees from the last multiple of so many tokens on; 0: all before it
    num_kv_heads: int
    k_dim: int
    v_dim: int
    element_bytes: int

    def __post_init__(self) -> None:
        if self.window and self.chunk:
            raise ConfigError(
                f"a layer has window={self.window} and chunk={self.chunk}: one of them must be 0"
            )

    @property
    def token_bytes(self) -> int:
        return self.num_kv_heads * (self.k_dim + self.v_dim) * self.element_bytes

    def block_bytes(self, block_size: int) -> int:
        """Of the layer's part of a block: K of all its tokens, then V, each aligned."""
        number_bytes = block_size * self.num_kv_heads * self.element_bytes
        return _aligned(number_bytes * self.k_dim) + _aligned(number_bytes * self.v_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that follow one block table; all see equally far."""

    layers: tuple[int, ...]  # indices into the layer specs
    window: int
    chunk: int = 0
    max_blocks: int | None = None  # most blocks that one sequence holds; None: all of its tokens'

    @property
    def is_local(self) -> bool:
        """Whether queries don't see all tokens before them."""
        return bool(self.window or self.chunk)

    def first_seen(self, num_tokens: int) -> int:
        """Place of the first token that the one after `num_tokens` sees."""
        if self.chunk:
            return num_tokens // self.chunk * self.chunk
        return max(0, num_tokens - self.window + 1) if self.window else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The pool: `num_blocks` blocks that all groups share.

    A block is `block_size` tokens of the layers of whichever group holds it, one layer after the
    other. Groups that fill less of it leave the rest unused.
    """

    block_size: int
    num_blocks: int
    groups: tuple[CacheGroup, ...]
    block_bytes: int  # of one block, on one rank

    def first_blocks(self, num_tokens: int) -> list[int]:
        """By group: place of the first block that the token after `num_tokens` sees."""
        return [group.first_seen(num_tokens) // self.block_size for group in self.groups]

    def missing(
        self, firsts: Sequence[int], tables: Sequence[Sequence[int]], num_tokens: int
    ) -> list[int]:
        """By group: blocks that a table, whose first is at `firsts`, lacks for so many tokens."""
        blocks = -(-num_tokens // self.block_size)
        return [
            (blocks if group.max_blocks is None else min(blocks, first + group.max_blocks))
            - (first + len(table))
            for group, first, table in zip(self.groups, firsts, tables, strict=True)
        ]

    def max_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds on its way to `num_tokens`, all groups together."""
        return _most_blocks(self.groups, -(-num_tokens // self.block_size))

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence that the pool holds alone."""
        most = MAX_TOKENS // self.block_size
        blocks = bisect_right(
            range(1, most), self.num_blocks, key=lambda length: _most_blocks(self.groups, length)
        )
        return blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Layers that see equally far, in the order of the model."""

    window: int
    chunk: int
    layers: list[int]
    sizes: list[int]  # bytes of each layer's part of a block
    max_blocks: int | None
    num_blocks: int  # that the longest sequence holds in each of its groups

    def groups(self, capacity: int) -> list[CacheGroup]:
        """As few as possible, none of which takes more than `capacity` bytes of a block."""
        ends = list(accumulate(_pack(self.sizes, capacity)))
        return [
            CacheGroup(
                layers=tuple(self.layers[start:end]),
                window=self.window,
                chunk=self.chunk,
                max_blocks=self.max_blocks,
            )
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]


def make_cache_layout(
    layers: Sequence[LayerCacheSpec],
    *,
    block_size: int,
    memory_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    max_chunk_tokens: int,
) -> CacheLayout:
    """Groups layers that see equally far, and fills the memory with blocks.

    Layers of different shapes may share a group; how large a block is decides how many groups there
    are and what they leave unused (`_cost`). Makes no more blocks than CACHED_SHARES times what
    `max_num_seqs` sequences of `max_model_len` tokens, fed in chunks of `max_chunk_tokens`, could
    use.

    Raises ConfigError: the memory doesn't hold one block of each group.
    """
    most_blocks = -(-max_model_len // block_size)
    kinds = _find_kinds(
        layers,
        block_size=block_size,
        max_chunk_tokens=max_chunk_tokens,
        most_blocks=most_blocks,
    )
    block_bytes = min(_capacities(kinds), key=lambda capacity: _cost(kinds, capacity))
    groups = tuple(group for kind in kinds for group in kind.groups(block_bytes))
    useful_blocks = max_num_seqs * _most_blocks(groups, most_blocks)
    num_blocks = min(memory_bytes // block_bytes, CACHED_SHARES * useful_blocks)
    if num_blocks < len(groups):
        raise ConfigError(
            f"kv_memory={memory_bytes} bytes holds {num_blocks} blocks of {block_bytes} bytes: "
            f"{len(groups)} are needed for the shortest sequence, "
            f"{len(groups) * block_bytes} bytes (set --kv-memory)"
        )
    return CacheLayout(
        block_size=block_size, num_blocks=num_blocks, groups=groups, block_bytes=block_bytes
    )


def window_blocks(window: int, chunk_tokens: int, block_size: int) -> int:
    """Blocks that cover what the queries of one feed see, wherever it begins in a block.

    The first query sees `window - 1` tokens before it; a run of n tokens touches at most
    ceil((n - 1) / block_size) + 1 blocks.
    """
    return -(-(window + chunk_tokens - 2) // block_size) + 1


def _most_blocks(groups: Sequence[CacheGroup], length: int) -> int:
    """For a sequence of `length` blocks of tokens."""
    return sum(
        length if group.max_blocks is None else min(length, group.max_blocks) for group in groups
    )


def _find_kinds(
    layers: Sequence[LayerCacheSpec], *, block_size: int, max_chunk_tokens: int, most_blocks: int
) -> list[_Kind]:
    """Those that see everything come first."""
    indices: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, spec in enumerate(layers):
        indices[spec.window, spec.chunk].append(index)
    kinds = []
    for (window, chunk), members in sorted(indices.items()):
        # The last query of an attention chunk sees as much as one with a window of that length.
        reach = window or chunk
        max_blocks = window_blocks(reach, max_chunk_tokens, block_size) if reach else None
        kind = _Kind(
            window=window,
            chunk=chunk,
            layers=members,
            sizes=[layers[index].block_bytes(block_size) for index in members],
            max_blocks=max_blocks,
            num_blocks=most_blocks if max_blocks is None else min(most_blocks, max_blocks),
        )
        kinds.append(kind)
    return kinds


def _capacities(kinds: Sequence[_Kind]) -> list[int]:
    """The block sizes in bytes that matter: between two of them, layers fall into equal groups."""
    runs = {
        run
        for kind in kinds
        for start in range(len(kind.sizes))
        for run in accumulate(kind.sizes[start:])
    }
    largest = max(size for kind in kinds for size in kind.sizes)
    return sorted(run for run in runs if run >= largest)


def _cost(kinds: Sequence[_Kind], capacity: int) -> float:
    """The memory that sequences take over what they fill, and the tables; less is better.

    Of a sequence of one block and of the longest one, whichever is worse: in a short one all kinds
    weigh the same, in a long one those that see everything.
    """
    counts = [len(_pack(kind.sizes, capacity)) for kind in kinds]

    def taken_over_filled(num_blocks: Sequence[int]) -> float:
        taken = sum(count * n for count, n in zip(counts, num_blocks, strict=True)) * capacity
        filled = sum(sum(kind.sizes) * n for kind, n in zip(kinds, num_blocks, strict=True))
        return taken / filled

    short = taken_over_filled([1] * len(kinds))
    long = taken_over_filled([kind.num_blocks for kind in kinds])
    return max(short, long) + TABLE_SHARE * sum(counts)


def _pack(sizes: Sequence[int], capacity: int) -> list[int]:
    """How many of these each group gets, filled in order up to `capacity`."""
    counts: list[int] = []
    room = 0
    for size in sizes:
        if not counts or size > room:
            counts.append(0)
            room = capacity
        counts[-1] += 1
        room -= size
    return counts


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
