"""Which layers share a block table, and how many blocks the memory holds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCacheSpec:
    """What one attention call of the forward pass keeps in the cache, on one rank."""

    window: int  # tokens a query sees, itself included; 0: all before it
    num_kv_heads: int
    k_dim: int
    v_dim: int
    element_bytes: int


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
