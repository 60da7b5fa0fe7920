"""Writes a step's keys and values to the cache."""

from functools import cache as once
from importlib.util import find_spec

import torch

from workers.attention.base import AttentionMetadata
from workers.kv_cache import LayerCache, as_cached


def write_kv(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata
) -> None:
    """Writes key [T, H, K] and value [T, H, V] to their slots; on a GPU by one kernel."""
    key, value = as_cached(key, cache.key.dtype), as_cached(value, cache.value.dtype)
    if key.is_cuda and _has_triton():
        from workers.attention.cache_writes import write_kv as write_by_kernel

        write_by_kernel(key, value, cache, metadata)
        return
    cache.key[metadata.slot_blocks, metadata.slot_offsets] = key
    cache.value[metadata.slot_blocks, metadata.slot_offsets] = value


@once
def _has_triton() -> bool:
    return find_spec("triton") is not None
