"""One kernel that puts a step's K and V into the paged cache, for backends on GPUs."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from workers.attention.base import AttentionMetadata
from workers.kv_cache import LayerCache

# A program writes about as many numbers of K, and of V.
PROGRAM_NUMBERS = 2048


class Traits(NamedTuple):
    """What the kernel is compiled for."""

    num_heads: int  # KV heads
    program_heads: int  # of them in a program, a power of two
    k_dim: int
    v_dim: int
    k_pad: int  # powers of two that the dimensions fit in
    v_pad: int


def write_kv(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata
) -> None:
    """Key [T, H, K] and value [T, H, V] go to the slots of the step, in the cache's dtype.

    Reads nothing on the host. Rows that share a slot leave one of theirs there.
    """
    num_heads, k_dim, v_dim = *key.shape[1:], value.shape[2]
    k_pad, v_pad = triton.next_power_of_2(k_dim), triton.next_power_of_2(v_dim)
    most_heads = max(1, PROGRAM_NUMBERS // max(k_pad, v_pad))
    program_heads = min(triton.next_power_of_2(num_heads), most_heads)
    write_rows[(len(key), triton.cdiv(num_heads, program_heads))](
        key,
        value,
        cache.key,
        cache.value,
        metadata.slot_blocks,
        metadata.slot_offsets,
        key.stride(),
        value.stride(),
        cache.key.stride(),
        cache.value.stride(),
        Traits(num_heads, program_heads, k_dim, v_dim, k_pad, v_pad),
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit
def write_rows(
    key,
    value,
    key_cache,
    value_cache,
    slot_blocks,
    slot_offsets,
    key_strides,
    value_strides,
    key_cache_strides,
    value_cache_strides,
    TRAITS: tl.constexpr,
):
    """Programs over (T, parts of H). Offsets have 64 bits: a pool is larger than 2^31 numbers."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(slot_blocks + row).to(tl.int64)
    offset = tl.load(slot_offsets + row).to(tl.int64)
    first_head = tl.program_id(1) * TRAITS.program_heads
    heads = first_head + tl.arange(0, TRAITS.program_heads)[:, None]
    is_head = heads < TRAITS.num_heads

    columns = tl.arange(0, TRAITS.k_pad)[None, :]
    mask = is_head & (columns < TRAITS.k_dim)
    source = row * key_strides[0] + heads * key_strides[1] + columns * key_strides[2]
    target = block * key_cache_strides[0] + offset * key_cache_strides[1]
    target = target + heads * key_cache_strides[2] + columns
    keys = tl.load(key + source, mask=mask).to(key_cache.dtype.element_ty)
    tl.store(key_cache + target, keys, mask=mask)

    columns = tl.arange(0, TRAITS.v_pad)[None, :]
    mask = is_head & (columns < TRAITS.v_dim)
    source = row * value_strides[0] + heads * value_strides[1] + columns * value_strides[2]
    target = block * value_cache_strides[0] + offset * value_cache_strides[1]
    target = target + heads * value_cache_strides[2] + columns
    values = tl.load(value + source, mask=mask).to(value_cache.dtype.element_ty)
    tl.store(value_cache + target, values, mask=mask)
