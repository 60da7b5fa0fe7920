"""Storages: who shares them, and what doesn't fit."""

from pathlib import Path

import pytest
import torch

from workers import kv_cache
from workers.config import CacheLayout, LayerCacheSpec
from workers.errors import CacheError
from workers.kv_cache import allocate, available_memory, copy_blocks

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")


def make_layer(heads: int = 2, k_dim: int = 8, v_dim: int = 4, window: int = 0) -> LayerCacheSpec:
    return LayerCacheSpec(
        window=window, num_kv_heads=heads, k_dim=k_dim, v_dim=v_dim, element_bytes=2
    )


def make_caches(layers, groups, *, num_blocks=6, available_bytes=1 << 20):
    return allocate(
        layers,
        CacheLayout(block_size=4, num_blocks=num_blocks, groups=groups),
        dtype=torch.bfloat16,
        device=CPU,
        available_bytes=available_bytes,
    )


def test_layers_of_a_group_are_apart_and_groups_share():
    layers = [make_layer()] * 4

    caches, cache_bytes = make_caches(layers, ((0, 2), (3, 1)))

    assert caches[0].key.shape == (6, 4, 2, 8)
    assert caches[0].value.shape == (6, 4, 2, 4)
    assert caches[0].key.data_ptr() == caches[3].key.data_ptr()
    assert caches[2].value.data_ptr() == caches[1].value.data_ptr()
    assert caches[0].key.data_ptr() != caches[2].key.data_ptr()
    assert cache_bytes == 2 * 6 * 4 * 2 * (8 + 4) * 2


def test_layers_of_other_heads_but_equal_size_share():
    caches, _ = make_caches([make_layer(2, 8, 4), make_layer(4, 4, 2)], ((0,), (1,)))

    assert caches[1].key.shape == (6, 4, 4, 4)
    assert caches[0].key[3].flatten().data_ptr() == caches[1].key[3].flatten().data_ptr()


@pytest.mark.parametrize(
    ("copies", "origins"),
    [
        ([(1, 2)], [0, 1, 1, 3, 4, 5]),
        ([(1, 2), (2, 3), (3, 5)], [0, 1, 1, 1, 4, 1]),
        ([(1, 2), (4, 1)], [0, 4, 1, 3, 4, 5]),
        ([(1, 2), (3, 2)], [0, 1, 3, 3, 4, 5]),
        ([(0, 5), (1, 0), (5, 1)], [1, 0, 2, 3, 4, 0]),
        ([], [0, 1, 2, 3, 4, 5]),
    ],
    ids=["one", "chain", "source-overwritten", "target-twice", "swap", "none"],
)
def test_blocks_are_copied_in_order_in_every_storage(copies, origins):
    """Storages of two groups; layers 0 and 3 share one with other heads, 2 and 1 another."""
    layers = [make_layer(2, 8, 4), make_layer(), make_layer(), make_layer(4, 4, 2)]
    caches, _ = make_caches(layers, ((0, 2), (3, 1)))
    generator = torch.Generator().manual_seed(0)
    for cache in (caches[0], caches[2]):
        cache.key.normal_(generator=generator)
        cache.value.normal_(generator=generator)
    before = [(cache.key.clone(), cache.value.clone()) for cache in caches]

    copy_blocks(caches, torch.tensor(copies, dtype=torch.int32).view(-1, 2))

    for cache, (key, value) in zip(caches, before, strict=True):
        assert cache.key.equal(key[origins])
        assert cache.value.equal(value[origins])


def test_layers_of_unequal_size_cannot_share():
    with pytest.raises(CacheError, match=r"layers 0 and 1 can't share .* \(16, 8\) and \(8, 8\)"):
        make_caches([make_layer(), make_layer(k_dim=4)], ((0,), (1,)))


@pytest.mark.parametrize("groups", [((0,),), ((0, 1), (1,)), ((0, 1, 2),)])
def test_groups_name_each_layer_once(groups):
    with pytest.raises(CacheError, match="each of the 2 layers once"):
        make_caches([make_layer()] * 2, groups)


def test_groups_are_equally_long():
    with pytest.raises(CacheError, match="equally many"):
        make_caches([make_layer()] * 3, ((0, 1), (2,)))


def test_no_blocks_are_too_few():
    with pytest.raises(CacheError, match="num_blocks=0"):
        make_caches([make_layer()], ((0,),), num_blocks=0)


def test_what_is_wanted_and_what_is_free_are_named():
    wanted = 6 * 4 * 2 * (8 + 4) * 2
    make_caches([make_layer()], ((0,),), available_bytes=wanted)

    with pytest.raises(CacheError, match=rf"of {wanted} bytes .*: {wanted - 1} bytes are free"):
        make_caches([make_layer()], ((0,),), available_bytes=wanted - 1)


def test_ranks_of_one_host_share_its_memory():
    alone, shared = available_memory(CPU, 1), available_memory(CPU, 4)

    assert shared == pytest.approx(alone / 4, rel=0.2)


def write_cgroup(folder: Path, limit: str) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("700\n")
    (folder / "memory.stat").write_text("anon 300\ninactive_file 250\nslab 9\n")
    return folder


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_cache, "CGROUP", write_cgroup(tmp_path, "1000"))
    assert available_memory(CPU, 2) == (1000 - 700 + 250) // 2

    write_cgroup(tmp_path, "400")
    assert available_memory(CPU, 1) == 0

    write_cgroup(tmp_path, "max")
    assert available_memory(CPU, 1) > 1 << 20
