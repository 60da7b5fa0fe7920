"""Writes a step's keys and values to the cache."""

import torch

from workers.attention.base import AttentionMetadata
from workers.kv_cache import LayerCache


def write_kv(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata
) -> None:
    """Writes key [T, H, K] and value [T, H, V] to their slots."""
    cache.key[metadata.slot_blocks, metadata.slot_offsets] = key
    cache.value[metadata.slot_blocks, metadata.slot_offsets] = value
