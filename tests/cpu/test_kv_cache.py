"""The pool: which layers share it, and what doesn't fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.cluster.loaded_model import loaded_model
from runtime.scheduling.cache_layout import make_cache_layout
from tests.transport import model_spec
from workers import kv_cache
from workers.codec import encode_spec
from workers.config import CacheLayout, LayerCacheSpec
from workers.errors import CacheError, ModelError
from workers.kv_cache import allocate, available_memory, copy_blocks

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")


def make_layer(heads: int = 2, k_dim: int = 8, v_dim: int = 4) -> LayerCacheSpec:
    return LayerCacheSpec(window=0, num_kv_heads=heads, k_dim=k_dim, v_dim=v_dim, element_bytes=2)


def make_caches(layers, groups, *, num_blocks=6, block_size=4, available_bytes=1 << 20):
    return allocate(
        layers,
        CacheLayout(block_size=block_size, num_blocks=num_blocks, groups=groups),
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


# 3 layers of different shapes, of which the second and third fill a block, and an odd small one.
SHAPES = [make_layer(1, 3, 5), make_layer(2, 8, 4), make_layer(3, 5, 7), make_layer(1, 1, 1)]
GROUPS = ((0,), (1, 2), (3,))


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_layers_of_a_group_never_touch_and_begin_at_16_bytes(block_size):
    caches, cache_bytes = make_caches(SHAPES, GROUPS, block_size=block_size)

    pool = caches[0].pool
    assert cache_bytes == pool.numel() * pool.itemsize
    for group in GROUPS:
        pool.zero_()
        parts = [part for layer in group for part in (caches[layer].key, caches[layer].value)]
        for number, part in enumerate(parts, start=1):
            assert part[0].is_contiguous()
            assert part.stride(0) * part.itemsize == cache_bytes // 6
            assert (part.data_ptr() - pool.data_ptr()) % 16 == 0
            part.fill_(number)
        for number, part in enumerate(parts, start=1):
            assert part.eq(number).all()
        assert int(pool.count_nonzero()) == sum(part.numel() for part in parts)


def test_a_block_holds_what_it_is_written_in_that_block_alone():
    caches, _ = make_caches(SHAPES, GROUPS)

    caches[2].key[4] = 1.0

    assert caches[2].pool.count_nonzero(dim=1).tolist() == [0, 0, 0, 0, 4 * 3 * 5, 0]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_driver_counts_the_same_bytes(block_size):
    kinds = [(0, 0), (9, 0), (0, 8)]
    layers = [
        replace(make_layer(heads, k_dim, v_dim), window=window, chunk=chunk)
        for heads in (1, 2, 3)
        for k_dim, v_dim in ((3, 5), (8, 4), (7, 7))
        for window, chunk in kinds
    ]
    layout = make_cache_layout(
        loaded_model([encode_spec(model_spec(layers=tuple(layers)))]).layers,
        block_size=block_size,
        memory_bytes=1 << 20,
        max_num_seqs=4,
        max_model_len=128,
        max_chunk_tokens=16,
    )

    _, cache_bytes = make_caches(
        layers,
        tuple(group.layers for group in layout.groups),
        num_blocks=layout.num_blocks,
        block_size=block_size,
    )

    assert len(layout.groups) > 1
    assert cache_bytes == layout.num_blocks * layout.block_bytes


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
def test_blocks_are_copied_in_order_for_every_layer(copies, origins):
    caches, _ = make_caches(SHAPES, GROUPS)
    caches[0].pool.normal_(generator=torch.Generator().manual_seed(0))
    before = [(cache.key.clone(), cache.value.clone()) for cache in caches]

    copy_blocks(caches, torch.tensor(copies, dtype=torch.int32).view(-1, 2))

    for cache, (key, value) in zip(caches, before, strict=True):
        assert cache.key.equal(key[origins])
        assert cache.value.equal(value[origins])


@pytest.mark.parametrize("groups", [((0,),), ((0, 1), (1,)), ((0, 1, 2),)])
def test_groups_name_each_layer_once(groups):
    with pytest.raises(CacheError, match="each of the 2 layers once"):
        make_caches([make_layer()] * 2, groups)


def test_numbers_of_another_width_are_refused():
    layers = [make_layer(), replace(make_layer(), element_bytes=4)]

    with pytest.raises(
        CacheError, match=r"layer 1 keeps numbers of 4 bytes, .*bfloat16: must be 2"
    ):
        make_caches(layers, ((0, 1),))


def test_a_window_and_a_chunk_are_refused_together():
    with pytest.raises(ModelError, match="window=6 and chunk=8: one of them must be 0"):
        replace(make_layer(), window=6, chunk=8)


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
