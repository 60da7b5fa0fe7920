"""Which layers share a block table, and how many blocks the memory holds."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import ConfigError

MAX_TOKENS = 2**31 - 1
# What running sequences may use, and three times as much to keep prefixes for later ones.
CACHED_SHARES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCacheSpec:
    """What one attention call of the forward pass keeps in the cache, on one rank."""

    window: int  # tokens a query sees, itself included; 0: all before it
    num_kv_heads: int
    k_dim: int
    v_dim: int
    element_bytes: int

    @property
    def token_bytes(self) -> int:
        return self.num_kv_heads * (self.k_dim + self.v_dim) * self.element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that follow one block table."""

    layers: tuple[int, ...]  # indices into the layer specs
    window: int
    max_blocks: int | None = None  # most blocks that one sequence holds; None: all of its tokens'

    def first_seen(self, num_tokens: int) -> int:
        """Place of the first token that the one after `num_tokens` sees."""
        return max(0, num_tokens - self.window + 1) if self.window else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The pool: `num_blocks` blocks that all groups share.

    Every group has as many layers as the others; layer i of every group lives in the same storage,
    so a block is `block_size` tokens of as many layers as a group has.
    """

    block_size: int
    num_blocks: int
    groups: tuple[CacheGroup, ...]
    block_bytes: int  # of one block, on one rank

    def first_blocks(self, num_tokens: int) -> list[int]:
        """By group: place of the first block that the token after `num_tokens` sees."""
        return [group.first_seen(num_tokens) // self.block_size for group in self.groups]

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


def make_cache_layout(
    layers: Sequence[LayerCacheSpec],
    *,
    block_size: int,
    memory_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    max_chunk_tokens: int,
) -> CacheLayout:
    """Groups layers by window, as many layers in every group, and fills the memory with blocks.

    Makes no more blocks than CACHED_SHARES times what `max_num_seqs` sequences of `max_model_len`
    tokens, fed in chunks of `max_chunk_tokens`, could use.

    Raises ConfigError: the layers differ in what a token takes, or the memory doesn't hold one
    block of each group.
    """
    shapes = {(spec.num_kv_heads, spec.k_dim, spec.v_dim, spec.element_bytes) for spec in layers}
    if len(shapes) > 1:
        raise ConfigError(
            f"the model's layers keep {len(shapes)} different shapes in the KV cache, "
            f"(KV heads, K dim, V dim, bytes) of {sorted(shapes)}: one shape is supported"
        )
    by_window: defaultdict[int, list[int]] = defaultdict(list)
    for index, spec in enumerate(layers):
        by_window[spec.window].append(index)
    group_size = math.gcd(*map(len, by_window.values()))
    groups = tuple(
        CacheGroup(
            layers=tuple(indices[start : start + group_size]),
            window=window,
            max_blocks=window_blocks(window, max_chunk_tokens, block_size) if window else None,
        )
        for window, indices in sorted(by_window.items())
        for start in range(0, len(indices), group_size)
    )
    block_bytes = group_size * block_size * layers[0].token_bytes
    useful_blocks = max_num_seqs * _most_blocks(groups, -(-max_model_len // block_size))
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
    """Blocks that cover what a chunk's queries see, wherever it begins in a block.

    The first query sees `window - 1` tokens before the chunk; a run of n tokens touches at most
    ceil((n - 1) / block_size) + 1 blocks.
    """
    return -(-(window + chunk_tokens - 2) // block_size) + 1


def _most_blocks(groups: Sequence[CacheGroup], length: int) -> int:
    """For a sequence of `length` blocks of tokens."""
    return sum(
        length if group.max_blocks is None else min(length, group.max_blocks) for group in groups
    )
