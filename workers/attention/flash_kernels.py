"""The kernels of the flash-attn libraries: what each takes, and how it is called.

They were never run here. All of this follows the sources of flash-attn 2.8.3, of the FA3 in its
`hopper` folder (3.0.0b1), and of flash-attn-4 4.0.0b36.

A layer's K and V are views [N, B, H, D] of the pool, strided by blocks of all its layers. FA2 and
FA3 go by all strides and want the last one to be 1. FA4 copies tensors whose pointer or strides
aren't multiples of 16 bytes: `kv_cache.ALIGNMENT_BYTES`, and head dims that are multiples of 8,
make them so.
"""

from collections.abc import Callable
from dataclasses import dataclass

from workers.attention.limits import SAME_DIMS, KernelLimits, same_dims
from workers.attention.paged_call import PagedCall, sums

# FA3 computes at most so many rows of queries at once, times heads that share a KV head.
LARGEST_QUERY_TILE = 192
TABLES_MOVE = (
    "key tiles count from where a table begins, and that follows what was computed together"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A release line's entry point, on the devices where it has one way to be called."""

    limits: KernelLimits
    block_size_multiple: int
    new_keywords: frozenset[str]  # of `arguments`: older releases lack them
    arguments: Callable[[PagedCall], dict[str, object]]


def _arguments_2(call: PagedCall) -> dict[str, object]:
    """Lengths of keys go in as sums, although blocks and not sums tell where keys are.

    Where max_seqlen_q is 1, row i of q is taken for sequence i.
    """
    assert call.sinks is None, "refused when the backend was made"
    metadata = call.metadata
    return {
        "q": call.query,
        "k": call.cache.key,
        "v": call.cache.value,
        "cu_seqlens_q": metadata.query_starts,
        "cu_seqlens_k": sums(call.key_lens()),
        "max_seqlen_q": metadata.max_query_len,
        "max_seqlen_k": metadata.max_total_len,
        "softmax_scale": call.scale,
        "causal": True,
        "window_size": _window(call.window, -1),
        "softcap": call.softcap,
        "block_table": metadata.block_tables,
    }


def _arguments_3(call: PagedCall) -> dict[str, object]:
    """No new keys are given: those of this step are in the cache, and count in its lengths."""
    assert call.sinks is None, "refused when the backend was made"
    metadata = call.metadata
    longest = metadata.max_query_len
    if call.deterministic:
        # How wide a key tile is depends on whether the longest query fills more than one tile of
        # queries, or is one token. It is an upper bound only: let it always say the same.
        longest = max(longest, LARGEST_QUERY_TILE + 1)
    return {
        "q": call.query,
        "k_cache": call.cache.key,
        "v_cache": call.cache.value,
        "cache_seqlens": call.key_lens(),
        "page_table": metadata.block_tables,
        "cu_seqlens_q": metadata.query_starts,
        "max_seqlen_q": longest,
        "softmax_scale": call.scale,
        "causal": True,
        "window_size": _window(call.window, -1),
        "softcap": call.softcap,
        "num_splits": 1 if call.deterministic else 0,  # 0: as the kernel likes
    }


def _arguments_4(call: PagedCall, num_splits: int) -> dict[str, object]:
    metadata = call.metadata
    return {
        "q": call.query,
        "k": call.cache.key,
        "v": call.cache.value,
        "cu_seqlens_q": metadata.query_starts,
        "max_seqlen_q": metadata.max_query_len,
        "max_seqlen_k": metadata.max_total_len,
        "seqused_k": call.key_lens(),
        "page_table": metadata.block_tables,
        "softmax_scale": call.scale,
        "causal": True,
        "window_size": _window(call.window, None),
        "learnable_sink": call.sinks,
        "softcap": call.softcap,
        "num_splits": num_splits,
    }


def _arguments_4_hopper(call: PagedCall) -> dict[str, object]:
    """There it can't split keys, which costs time where few sequences are long."""
    return _arguments_4(call, num_splits=1)


def _arguments_4_blackwell(call: PagedCall) -> dict[str, object]:
    return _arguments_4(call, num_splits=0)  # as the kernel likes


def _window(window: int, endless: int | None) -> tuple[int | None, int | None]:
    """Keys to the left of a query's own that it sees, and to the right."""
    return (window - 1, 0) if window else (endless, endless)


def _takes_dims_3(k_dim: int, v_dim: int) -> bool:
    if k_dim % 8 or v_dim % 8:
        return False
    apart = (128 < k_dim <= 192 and 96 < v_dim <= 128) or (k_dim <= 64 and v_dim <= 512)
    return k_dim == v_dim <= 256 or apart


def _takes_dims_4_hopper(k_dim: int, v_dim: int) -> bool:
    return max(k_dim, v_dim) <= 256 and k_dim % 8 == v_dim % 8 == 0


def _takes_dims_4_blackwell(k_dim: int, v_dim: int) -> bool:
    if k_dim % 8 or v_dim % 8:
        return False
    return max(k_dim, v_dim) <= 128 or (k_dim, v_dim) in ((192, 128), (256, 256))


_NEW_4 = frozenset({"max_seqlen_q", "page_table", "learnable_sink", "num_splits"})

FA4_BLACKWELL = Kernel(
    limits=KernelLimits(
        kernel="FA4 on Blackwell",
        capabilities=(10,),
        takes_dims=_takes_dims_4_blackwell,
        dims="head dims of at most 128, 192 and 128, or 256 and 256, multiples of 8",
        takes_softcap=True,
        takes_sinks=True,
        varies="its stages follow the batch's longest query",
    ),
    block_size_multiple=1,
    new_keywords=_NEW_4,
    arguments=_arguments_4_blackwell,
)
FA4_HOPPER = Kernel(
    limits=KernelLimits(
        kernel="FA4 on Hopper",
        capabilities=(9,),
        takes_dims=_takes_dims_4_hopper,
        dims="head dims of at most 256, multiples of 8",
        takes_softcap=True,
        takes_sinks=True,
        windows_vary=TABLES_MOVE,
    ),
    block_size_multiple=1,
    new_keywords=_NEW_4,
    arguments=_arguments_4_hopper,
)
FA3 = Kernel(
    limits=KernelLimits(
        kernel="FA3",
        capabilities=(9,),
        takes_dims=_takes_dims_3,
        dims=f"{SAME_DIMS}, or 136 to 192 with 104 to 128, or at most 64 with 512",
        takes_softcap=True,
        takes_sinks=False,
        windows_vary=TABLES_MOVE,
    ),
    block_size_multiple=1,
    new_keywords=frozenset({"page_table", "cu_seqlens_q", "num_splits", "softcap"}),
    arguments=_arguments_3,
)
FA2 = Kernel(
    limits=KernelLimits(
        kernel="FA2",
        capabilities=(8, 9, 10, 12),
        takes_dims=same_dims,
        dims=SAME_DIMS,
        takes_softcap=True,
        takes_sinks=False,
        varies="it splits keys by the batch's size and longest sequence",
    ),
    block_size_multiple=256,
    new_keywords=frozenset({"window_size", "softcap", "block_table"}),
    arguments=_arguments_2,
)
