"""The paged KV cache of one rank: one pool of blocks, and what memory there is for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from workers.config import CacheLayout, LayerCacheSpec
from workers.errors import CacheError, ModelError

CGROUP = Path("/sys/fs/cgroup")
# K and V of a layer begin at multiples of so many bytes: kernels load vectors of them.
ALIGNMENT_BYTES = 16
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where one attention call keeps its keys and values: a part of every block.

    Layers of other groups have theirs at the same place. In a block both are contiguous.
    """

    key: torch.Tensor  # [N, B, H, K]
    value: torch.Tensor  # [N, B, H, V]
    pool: torch.Tensor  # [N, numbers of a block]: all of it; key and value are views


def resolve_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """By name; auto is `dtype`, the model's. Raises ModelError: there is no such format."""
    if name == "auto":
        return dtype
    if name != "fp8":
        raise ModelError(f"kv_cache_dtype={name} must be auto or fp8")
    return FP8


def as_cached(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In the cache's format; in FP8 what is too large becomes the largest number there is."""
    if dtype != FP8:
        return values.to(dtype)
    return values.float().clamp(-LARGEST, LARGEST).to(dtype)


def available_memory(device: torch.device, local_world_size: int) -> int:
    """Bytes that this rank may still allocate: its share of what the host or device has free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # not there where only a device is checked, by `make gpu-check`

    free = min(psutil.virtual_memory().available, _cgroup_headroom(CGROUP))
    return int(free) // local_world_size


def allocate(
    layers: Sequence[LayerCacheSpec],
    layout: CacheLayout,
    *,
    dtype: torch.dtype,
    device: torch.device,
    available_bytes: int,
) -> tuple[tuple[LayerCache, ...], int]:
    """Makes the pool and gives every layer its views; returns them and the bytes allocated.

    Raises CacheError: the layout doesn't fit the layers or the memory; nothing is allocated.
    """
    _check_layout(layers, layout, dtype)
    block_bytes = max(
        sum(sum(_part_bytes(layers[layer], layout.block_size)) for layer in group)
        for group in layout.groups
    )
    wanted = layout.num_blocks * block_bytes
    if wanted > available_bytes:
        raise CacheError(
            f"KV cache of {wanted} bytes ({layout.num_blocks} blocks of {layout.block_size} "
            f"tokens) doesn't fit: {available_bytes} bytes are free for this rank; "
            "lower kv_memory"
        )
    pool = torch.zeros(layout.num_blocks, block_bytes // dtype.itemsize, dtype=dtype, device=device)
    caches: dict[int, LayerCache] = {}
    for group in layout.groups:
        start = 0
        for index in group:
            layer = layers[index]
            key_bytes, value_bytes = _part_bytes(layer, layout.block_size)
            shape = layout.block_size, layer.num_kv_heads
            key = _view(pool, start, *shape, layer.k_dim)
            value = _view(pool, start + key_bytes, *shape, layer.v_dim)
            caches[index] = LayerCache(key, value, pool)
            start += key_bytes + value_bytes
    return tuple(caches[index] for index in range(len(layers))), wanted


def copy_blocks(caches: Sequence[LayerCache], copies: torch.Tensor) -> None:
    """Copies blocks whole, source to target [K, 2], one copy after the other."""
    origin: dict[int, int] = {}  # of what each target holds in the end
    for source, target in copies.tolist():
        origin[target] = origin.get(source, source)
    pool = caches[0].pool
    moves = torch.tensor([[*origin], [*origin.values()]], dtype=torch.int64)
    targets, sources = moves.to(pool.device, non_blocking=True)
    # All sources are read before a target is written.
    pool[targets] = pool[sources]


def _check_layout(
    layers: Sequence[LayerCacheSpec], layout: CacheLayout, dtype: torch.dtype
) -> None:
    if layout.num_blocks < 1 or layout.block_size < 1:
        raise CacheError(
            f"num_blocks={layout.num_blocks} and block_size={layout.block_size} "
            "must be at least 1; raise kv_memory"
        )
    if sorted(chain.from_iterable(layout.groups)) != list(range(len(layers))):
        raise CacheError(
            f"cache groups {layout.groups} must name each of the {len(layers)} layers once"
        )
    for index, layer in enumerate(layers):
        if layer.element_bytes != dtype.itemsize:
            raise CacheError(
                f"layer {index} keeps numbers of {layer.element_bytes} bytes, the cache is "
                f"{dtype}: must be {dtype.itemsize} bytes"
            )


def _part_bytes(layer: LayerCacheSpec, block_size: int) -> tuple[int, int]:
    """Of a layer's K and of its V in a block, each aligned; as the driver counts them."""
    number_bytes = block_size * layer.num_kv_heads * layer.element_bytes
    return _aligned(number_bytes * layer.k_dim), _aligned(number_bytes * layer.v_dim)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _view(
    pool: torch.Tensor, start_bytes: int, block_size: int, num_heads: int, dim: int
) -> torch.Tensor:
    """[N, B, H, dim], from `start_bytes` on in every block."""
    start = start_bytes // pool.itemsize
    part = pool[:, start : start + block_size * num_heads * dim]
    return part.view(len(pool), block_size, num_heads, dim)


def _cgroup_headroom(cgroup: Path) -> float:
    """Bytes below the container's limit (cgroup v2); infinite where there is none.

    File pages that the kernel can drop count as free, as they do in the host's figure.
    """
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = (cgroup / "memory.stat").read_text().split()
    except FileNotFoundError:
        return float("inf")
    if limit == "max":
        return float("inf")
    droppable = int(stat[stat.index("inactive_file") + 1])
    return max(0, int(limit) - used + droppable)
