import pytest

from runtime.errors import ConfigError
from runtime.scheduling.block_pool import BlockPool
from runtime.scheduling.cache_layout import CacheLayout, LayerCacheSpec, make_cache_layout
from runtime.scheduling.cache_manager import CacheManager
from tests.scheduling import make_layout

pytestmark = pytest.mark.unit


def layout_of(layers: list[LayerCacheSpec], *, memory_bytes: int = 1 << 20) -> CacheLayout:
    return make_cache_layout(
        layers, block_size=16, memory_bytes=memory_bytes, max_num_seqs=64, max_model_len=1 << 14
    )


def spec(window: int = 0, *, num_kv_heads: int = 1) -> LayerCacheSpec:
    return LayerCacheSpec(
        window=window, num_kv_heads=num_kv_heads, k_dim=8, v_dim=8, element_bytes=2
    )


def test_a_pool_hands_out_what_was_freed_first() -> None:
    pool = BlockPool(3)
    first = pool.allocate(2)
    assert first == [0, 1]
    pool.release(reversed(first))
    assert pool.allocate(3) == [2, 1, 0]


def test_a_pool_that_is_too_small_is_unchanged() -> None:
    pool = BlockPool(2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2


def test_releasing_twice_is_a_bug() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="block 0 is released"):
        pool.release(blocks)


def test_invariants_see_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check_invariants([])


def test_tables_grow_by_whole_blocks_in_every_group() -> None:
    cache = CacheManager(make_layout(num_blocks=8, block_size=4, num_groups=2))
    assert cache.grow(1, 5) == ([0, 1], [2, 3])
    assert cache.grow(1, 8) == ([], [])
    assert cache.grow(1, 9) == ([4], [5])
    cache.check_invariants()


def test_growth_that_does_not_fit_changes_nothing() -> None:
    cache = CacheManager(make_layout(num_blocks=4, block_size=4, num_groups=2))
    cache.grow(1, 4)
    assert cache.grow(1, 12) is None
    assert cache.grow(2, 5) is None
    assert cache.pool.num_free == 2
    cache.check_invariants()


def test_gemma_has_one_full_group_and_five_window_groups() -> None:
    layers = [spec(window=0 if index % 6 == 5 else 512) for index in range(18)]
    layout = layout_of(layers)
    assert [group.window for group in layout.groups] == [0, 512, 512, 512, 512, 512]
    assert layout.groups[0].layers == (5, 11, 17)
    assert layout.groups[1].layers == (0, 1, 2)
    assert layout.block_bytes == 3 * 16 * 32
    assert layout.num_blocks == (1 << 20) // layout.block_bytes
    assert layout.max_sequence_tokens == layout.num_blocks // 6 * 16


def test_layers_of_one_kind_are_one_group() -> None:
    layout = layout_of([spec()] * 4)
    assert [group.layers for group in layout.groups] == [(0, 1, 2, 3)]


def test_too_little_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="kv_memory=100 bytes holds 0 blocks of 512 bytes"):
        layout_of([spec()], memory_bytes=100)


def test_layers_of_different_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 different shapes"):
        layout_of([spec(), spec(num_kv_heads=2)])


def test_no_more_blocks_than_all_sequences_can_use() -> None:
    layout = make_cache_layout(
        [spec()], block_size=16, memory_bytes=1 << 20, max_num_seqs=2, max_model_len=40
    )
    assert layout.num_blocks == 2 * 3
