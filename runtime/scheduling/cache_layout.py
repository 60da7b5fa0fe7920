"""Which layers share a block table, and how many blocks the memory holds."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import ConfigError


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

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest sequence that the pool holds alone."""
        return self.num_blocks // len(self.groups) * self.block_size


def make_cache_layout(
    layers: Sequence[LayerCacheSpec],
    *,
    block_size: int,
    memory_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
) -> CacheLayout:
    """Groups layers by window, as many layers in every group, and fills the memory with blocks.

    Makes no more blocks than `max_num_seqs` sequences of `max_model_len` tokens could use.

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
        CacheGroup(layers=tuple(indices[start : start + group_size]), window=window)
        for window, indices in sorted(by_window.items())
        for start in range(0, len(indices), group_size)
    )
    block_bytes = group_size * block_size * layers[0].token_bytes
    useful_blocks = max_num_seqs * -(-max_model_len // block_size) * len(groups)
    num_blocks = min(memory_bytes // block_bytes, useful_blocks)
    if num_blocks < len(groups):
        raise ConfigError(
            f"kv_memory={memory_bytes} bytes holds {num_blocks} blocks of {block_bytes} bytes: "
            f"{len(groups)} are needed for the shortest sequence, "
            f"{len(groups) * block_bytes} bytes (set --kv-memory)"
        )
    return CacheLayout(
        block_size=block_size, num_blocks=num_blocks, groups=groups, block_bytes=block_bytes
    )
