"""The paged KV cache of one rank: storages, and what memory there is for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import psutil
import torch

from workers.config import CacheLayout, LayerCacheSpec
from workers.errors import CacheError

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where one attention call keeps its keys and values. Layers of other groups share it."""

    key: torch.Tensor  # [N, B, H, K]
    value: torch.Tensor  # [N, B, H, V]


def available_memory(device: torch.device, local_world_size: int) -> int:
    """Bytes that this rank may still allocate: its share of what the host or device has free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
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
    """Makes the storages and gives every layer its view; returns them and the bytes allocated.

    Raises CacheError: the layout doesn't fit the layers or the memory; nothing is allocated.
    """
    _check_layout(layers, layout)
    storages = [layers[first] for first in layout.groups[0]]
    tokens = layout.num_blocks * layout.block_size
    wanted = sum(tokens * _bytes_per_token(layer) for layer in storages)
    if wanted > available_bytes:
        raise CacheError(
            f"KV cache of {wanted} bytes ({layout.num_blocks} blocks of {layout.block_size} "
            f"tokens) doesn't fit: {available_bytes} bytes are free for this rank; "
            "lower kv_memory"
        )
    caches: dict[int, LayerCache] = {}
    for slot, storage in enumerate(storages):
        key = torch.zeros(tokens * storage.num_kv_heads * storage.k_dim, dtype=dtype, device=device)
        value = torch.zeros(
            tokens * storage.num_kv_heads * storage.v_dim, dtype=dtype, device=device
        )
        for group in layout.groups:
            layer = layers[group[slot]]
            shape = (layout.num_blocks, layout.block_size, layer.num_kv_heads)
            caches[group[slot]] = LayerCache(
                key.view(*shape, layer.k_dim), value.view(*shape, layer.v_dim)
            )
    return tuple(caches[layer] for layer in range(len(layers))), wanted


def copy_blocks(caches: Sequence[LayerCache], copies: torch.Tensor) -> None:
    """Copies blocks, source to target [K, 2], one copy after the other.

    In the storages of all layers: a block id names the same place in each.
    """
    origin: dict[int, int] = {}  # of what each target holds in the end
    for source, target in copies.tolist():
        origin[target] = origin.get(source, source)
    moves = torch.tensor([[*origin], [*origin.values()]], dtype=torch.int64)
    targets, sources = moves.to(caches[0].key.device)
    # Once each: layers of other groups share a storage, and a second time would copy what the
    # first has written.
    storages = {cache.key.data_ptr(): cache for cache in caches}
    for storage in storages.values():
        # All sources are read before a target is written.
        storage.key[targets] = storage.key[sources]
        storage.value[targets] = storage.value[sources]


def _check_layout(layers: Sequence[LayerCacheSpec], layout: CacheLayout) -> None:
    if layout.num_blocks < 1 or layout.block_size < 1:
        raise CacheError(
            f"num_blocks={layout.num_blocks} and block_size={layout.block_size} "
            "must be at least 1; raise kv_memory"
        )
    if sorted(chain.from_iterable(layout.groups)) != list(range(len(layers))):
        raise CacheError(
            f"cache groups {layout.groups} must name each of the {len(layers)} layers once"
        )
    for group in layout.groups:
        if len(group) != len(layout.groups[0]):
            raise CacheError(f"cache groups {layout.groups} must have equally many layers")
        for mine, first in zip(group, layout.groups[0], strict=True):
            if _elements(layers[mine]) != _elements(layers[first]):
                raise CacheError(
                    f"layers {first} and {mine} can't share a storage: K and V elements per token "
                    f"are {_elements(layers[first])} and {_elements(layers[mine])}"
                )


def _elements(layer: LayerCacheSpec) -> tuple[int, int]:
    return layer.num_kv_heads * layer.k_dim, layer.num_kv_heads * layer.v_dim


def _bytes_per_token(layer: LayerCacheSpec) -> int:
    return sum(_elements(layer)) * layer.element_bytes


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
