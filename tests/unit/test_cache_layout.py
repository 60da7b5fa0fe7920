"""Which layers share a block table, how large a block is, and how many there are."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.scheduling.cache_layout import (
    CACHED_SHARES,
    TABLE_SHARE,
    CacheGroup,
    CacheLayout,
    LayerCacheSpec,
    make_cache_layout,
    window_blocks,
)

pytestmark = pytest.mark.unit

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 14
MAX_CHUNK_TOKENS = 512
# (window, chunk)
KINDS = [(0, 0), (64, 0), (512, 0), (0, 256), (0, 1 << 13)]


def layout_of(layers: Sequence[LayerCacheSpec], *, memory_bytes: int = 1 << 40) -> CacheLayout:
    return make_cache_layout(
        layers,
        block_size=BLOCK_SIZE,
        memory_bytes=memory_bytes,
        max_num_seqs=64,
        max_model_len=MAX_MODEL_LEN,
        max_chunk_tokens=MAX_CHUNK_TOKENS,
    )


def spec(
    window: int = 0, *, chunk: int = 0, num_kv_heads: int = 1, k_dim: int = 8, v_dim: int = 8
) -> LayerCacheSpec:
    return LayerCacheSpec(
        window=window,
        chunk=chunk,
        num_kv_heads=num_kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        element_bytes=2,
    )


def num_layers(layout: CacheLayout) -> list[int]:
    return [len(group.layers) for group in layout.groups]


def test_gemma_has_one_full_group_and_five_window_groups() -> None:
    layers = [spec(window=0 if index % 6 == 5 else 512) for index in range(18)]
    layout = layout_of(layers, memory_bytes=1 << 20)
    assert [group.window for group in layout.groups] == [0, 512, 512, 512, 512, 512]
    assert [group.max_blocks for group in layout.groups] == [None, *[65] * 5]
    assert layout.groups[0].layers == (5, 11, 17)
    assert layout.groups[1].layers == (0, 1, 2)
    assert layout.block_bytes == 3 * 16 * 32
    assert layout.num_blocks == (1 << 20) // layout.block_bytes
    assert layout.max_blocks_for(100 * 16) == 100 + 5 * 65
    assert layout.max_sequence_tokens == (layout.num_blocks - 5 * 65) * 16


def test_chunks_have_groups_of_their_own() -> None:
    layers = [spec(chunk=0 if index % 4 == 3 else 1024) for index in range(12)]
    layout = layout_of(layers)
    assert [(group.window, group.chunk) for group in layout.groups] == [(0, 0), *[(0, 1024)] * 3]
    assert layout.groups[0].layers == (3, 7, 11)
    assert [group.max_blocks for group in layout.groups] == [
        None,
        *[window_blocks(1024, MAX_CHUNK_TOKENS, BLOCK_SIZE)] * 3,
    ]


@pytest.mark.parametrize(
    ("num_window", "num_full", "wanted"),
    [
        (0, 61, [61]),
        (18, 18, [18, 18]),
        (29, 5, [5, 5, 5, 5, 5, 5, 4]),  # a place of 35 is unused, for 27 tables less
        (3, 1, [1, 1, 1, 1]),  # three in a block would leave two of three unused for long texts
        (31, 1, [1] * 32),
    ],
)
def test_a_little_memory_is_given_for_fewer_tables(
    num_window: int, num_full: int, wanted: list[int]
) -> None:
    layers = [spec(window=64)] * num_window + [spec()] * num_full
    assert num_layers(layout_of(layers)) == wanted


def test_layers_of_different_shapes_share_a_group() -> None:
    """As in Gemma 4: few wide heads see everything, more and narrower ones a window."""
    layers = [
        spec(num_kv_heads=1, k_dim=16, v_dim=16)
        if index % 6 == 5
        else spec(window=512, num_kv_heads=4)
        for index in range(24)
    ]
    layout = layout_of(layers)
    assert layout.block_bytes == 4 * layers[5].block_bytes(BLOCK_SIZE)
    assert num_layers(layout) == [4, *[2] * 10]
    mixed = layout_of([spec(), spec(k_dim=24), spec(v_dim=4)])
    assert num_layers(mixed) == [3]
    assert mixed.block_bytes == 16 * 2 * (8 + 8 + 24 + 8 + 8 + 4)


@st.composite
def layer_lists(draw: st.DrawFn) -> list[LayerCacheSpec]:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True))
    shapes = draw(
        st.lists(
            st.tuples(st.integers(1, 8), st.integers(1, 32), st.integers(1, 32)),
            min_size=1,
            max_size=4,
        )
    )
    chosen = draw(
        st.lists(
            st.tuples(st.sampled_from(kinds), st.sampled_from(shapes)), min_size=1, max_size=40
        )
    )
    return [
        spec(window, chunk=chunk, num_kv_heads=heads, k_dim=k_dim, v_dim=v_dim)
        for (window, chunk), (heads, k_dim, v_dim) in chosen
    ]


def size_of(layers: Sequence[LayerCacheSpec], members: Sequence[int]) -> int:
    return sum(layers[index].block_bytes(BLOCK_SIZE) for index in members)


@given(layers=layer_lists())
def test_groups_are_runs_of_one_kind_that_fit_a_block(layers: list[LayerCacheSpec]) -> None:
    layout = layout_of(layers)
    by_kind: dict[tuple[int, int], list[CacheGroup]] = {}
    for group in layout.groups:
        by_kind.setdefault((group.window, group.chunk), []).append(group)
    for kind, groups in by_kind.items():
        members = [layer for group in groups for layer in group.layers]
        assert members == [
            index for index, each in enumerate(layers) if (each.window, each.chunk) == kind
        ]
        for one, following in pairwise(groups):
            joined = [*one.layers, following.layers[0]]
            assert size_of(layers, joined) > layout.block_bytes, "a table too many"
    assert sum(num_layers(layout)) == len(layers)
    # All of a block is used by some group.
    assert max(size_of(layers, group.layers) for group in layout.groups) == layout.block_bytes


def overhead(
    layers: Sequence[LayerCacheSpec], groups: Sequence[CacheGroup], block_bytes: int, length: int
) -> float:
    """Memory taken over memory filled by a sequence of `length` blocks of tokens."""

    def held(group: CacheGroup) -> int:
        return length if group.max_blocks is None else min(length, group.max_blocks)

    taken = sum(held(group) * block_bytes for group in groups)
    return taken / sum(held(group) * size_of(layers, group.layers) for group in groups)


def cost_of(
    layers: Sequence[LayerCacheSpec], groups: Sequence[CacheGroup], block_bytes: int
) -> float:
    lengths = (1, MAX_MODEL_LEN // BLOCK_SIZE)
    worst = max(overhead(layers, groups, block_bytes, length) for length in lengths)
    return worst + TABLE_SHARE * len(groups)


def groups_of(layers: Sequence[LayerCacheSpec], block_bytes: int) -> list[CacheGroup]:
    """Groups filled in order up to so many bytes."""
    groups: list[CacheGroup] = []
    for kind in {(each.window, each.chunk) for each in layers}:
        window, chunk = kind
        reach = window or chunk
        limit = window_blocks(reach, MAX_CHUNK_TOKENS, BLOCK_SIZE) if reach else None
        open_group: tuple[int, ...] = ()
        runs = []
        for index, each in enumerate(layers):
            if (each.window, each.chunk) != kind:
                continue
            if open_group and size_of(layers, [*open_group, index]) > block_bytes:
                runs.append(open_group)
                open_group = ()
            open_group = (*open_group, index)
        groups += [
            CacheGroup(layers=run, window=window, chunk=chunk, max_blocks=limit)
            for run in [*runs, open_group]
        ]
    return groups


@given(layers=layer_lists(), data=st.data())
def test_no_other_block_costs_less(layers: list[LayerCacheSpec], data: st.DataObject) -> None:
    layout = layout_of(layers)
    largest = max(each.block_bytes(BLOCK_SIZE) for each in layers)
    other = data.draw(st.integers(largest, size_of(layers, range(len(layers)))))
    cost = cost_of(layers, layout.groups, layout.block_bytes)
    assert cost <= cost_of(layers, groups_of(layers, other), other) + 1e-9


@given(kinds=st.lists(st.sampled_from(KINDS[:3]), min_size=1, max_size=60))
def test_layers_of_one_shape_waste_no_more_than_saved_tables_are_worth(
    kinds: list[tuple[int, int]],
) -> None:
    layers = [spec(window, chunk=chunk) for window, chunk in kinds]
    layout = layout_of(layers)
    saved = len(layers) - len(layout.groups)
    for length in (1, MAX_MODEL_LEN // BLOCK_SIZE):
        wasted = overhead(layers, layout.groups, layout.block_bytes, length) - 1
        assert -1e-9 < wasted < TABLE_SHARE * saved + 1e-9
    if len(set(kinds)) == 1:
        assert len(layout.groups) == 1


@pytest.mark.parametrize(
    ("heads", "k_dim", "v_dim", "block_size", "wanted"),
    [(1, 8, 8, 16, 512), (3, 5, 7, 1, 32 + 48), (1, 1, 1, 4, 32), (2, 4, 6, 2, 32 + 48)],
)
def test_keys_and_values_begin_at_16_bytes(
    heads: int, k_dim: int, v_dim: int, block_size: int, wanted: int
) -> None:
    layer = spec(num_kv_heads=heads, k_dim=k_dim, v_dim=v_dim)
    assert layer.block_bytes(block_size) == wanted


def test_a_window_and_a_chunk_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="window=6 and chunk=8: one of them must be 0"):
        spec(6, chunk=8)


@pytest.mark.parametrize(
    ("window", "chunk", "first_seen"),
    [
        (0, 0, [0, 0, 0, 0, 0, 0, 0, 0]),
        (3, 0, [0, 0, 0, 1, 2, 3, 4, 5]),
        (1, 0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (0, 3, [0, 0, 0, 3, 3, 3, 6, 6]),
        (0, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_what_the_next_token_sees(window: int, chunk: int, first_seen: list[int]) -> None:
    group = CacheGroup(layers=(0,), window=window, chunk=chunk)
    assert group.is_local == bool(window or chunk)
    assert [group.first_seen(num_tokens) for num_tokens in range(8)] == first_seen


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("window", [1, 2, 16, 17])
@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_window_blocks_are_what_the_worst_chunk_touches(
    window: int, chunk: int, block_size: int
) -> None:
    touched = [
        (start + chunk - 1) // block_size - (start - window + 1) // block_size + 1
        for start in range(window, window + 2 * block_size)
    ]
    assert window_blocks(window, chunk, block_size) == max(touched)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [1, 2, 16, 17])
@pytest.mark.parametrize("num_fed", [1, 5, 40])
def test_chunks_touch_no_more_than_windows_of_their_length(
    chunk: int, num_fed: int, block_size: int
) -> None:
    touched = [
        (start + num_fed - 1) // block_size - start // chunk * chunk // block_size + 1
        for start in range(3 * chunk * block_size)
    ]
    most = window_blocks(chunk, num_fed, block_size)
    # Where blocks and chunks begin together, a chunk touches a block less at most.
    assert most - 1 <= max(touched) <= most


def test_too_little_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="kv_memory=100 bytes holds 0 blocks of 512 bytes"):
        layout_of([spec()], memory_bytes=100)


def test_no_more_blocks_than_all_sequences_and_their_prefixes_can_use() -> None:
    layout = make_cache_layout(
        [spec()],
        block_size=16,
        memory_bytes=1 << 20,
        max_num_seqs=2,
        max_model_len=40,
        max_chunk_tokens=16,
    )
    assert layout.num_blocks == CACHED_SHARES * 2 * 3
