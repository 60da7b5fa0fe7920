"""Triton kernels over the paged KV cache; `triton` launches them.

Scores are to base 2: `scale`, `softcap` and sinks carry a factor of log2(e). Offsets into the pool
have 64 bits: it is larger than 2^31 numbers. Strides are in numbers, one for each dimension.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Traits(NamedTuple):
    """What a kernel is compiled for."""

    group: int  # query heads of a KV head
    k_dim: int
    v_dim: int
    k_pad: int  # powers of two that the dimensions fit in
    v_pad: int
    window: int
    chunk: int
    softcap: float
    block_size: int
    tile_rows: int  # of a program: its queries, each with the heads of a group
    tile_keys: int  # of each turn of its loop


class Cache(NamedTuple):
    """One layer's part of the pool; in a block a head's numbers are side by side."""

    key: object  # [N, B, H, K]
    value: object  # [N, B, H, V]
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]


class Step(NamedTuple):
    """As AttentionMetadata has them."""

    seq_lens: object  # [S] int32
    query_starts: object  # [S + 1] int32
    first_blocks: object  # [S] int32
    block_tables: object  # [S, max_blocks] int32
    table_stride: int


@triton.jit
def _sequence_of(tile, query_starts, num_sequences, TILE_QUERIES: tl.constexpr):
    """Tiles of sequence s begin at query_starts[s] // TILE_QUERIES + s, which is room enough."""
    low: tl.int32 = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_starts + middle) // TILE_QUERIES + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _first_seen(position, TRAITS: tl.constexpr):
    """Place of the first key that a query at `position` sees."""
    if TRAITS.chunk:
        return position // TRAITS.chunk * TRAITS.chunk
    if TRAITS.window:
        return tl.maximum(position + 1 - TRAITS.window, 0)
    return position * 0


@triton.jit
def _tanh(x):
    small = tl.exp2(tl.abs(x) * -2.8853900817779268)  # e^(-2 |x|), which can't overflow
    size = (1 - small) / (1 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def _load_queries(query, strides, rows, heads, exists, cache, TRAITS: tl.constexpr):
    """[M, k_pad] in the cache's dtype, of `rows` [M] int64 and `heads` [M]; 0 where none exists."""
    columns = tl.arange(0, TRAITS.k_pad)[None, :]
    places = (rows * strides[0] + heads * strides[1])[:, None] + columns * strides[2]
    mask = exists[:, None] & (columns < TRAITS.k_dim)
    return tl.load(query + places, mask=mask, other=0.0).to(cache.key.dtype.element_ty)


@triton.jit
def _load_sinks(sinks, heads, exists):
    return tl.load(sinks + heads, mask=exists, other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit
def _attend_keys(
    query, positions, first, end, top, mass, cache, kv_head, table, scale, TRAITS: tl.constexpr
):
    """Softmax over the keys at places [first, end), tile by tile; nothing else is read.

    Query [M, k_pad] at `positions` [M]; `table` points to where block 0 of the sequence would be.
    Returns the highest score [M] and the mass [M], which go on from `top` and `mass`, and the
    values' sum by mass [M, v_pad], all float32. Tiles begin at multiples of tile_keys, and keys
    that a query doesn't see add 0: its bits depend on its sequence alone.
    """
    output = tl.full([TRAITS.tile_rows, TRAITS.v_pad], 0.0, dtype=tl.float32)
    k_columns = tl.arange(0, TRAITS.k_pad)[:, None]
    v_columns = tl.arange(0, TRAITS.v_pad)[None, :]
    seen_from = _first_seen(positions, TRAITS)[:, None]
    key_strides = cache.key_strides
    value_strides = cache.value_strides
    for start in range(first // TRAITS.tile_keys * TRAITS.tile_keys, end, TRAITS.tile_keys):
        places = start + tl.arange(0, TRAITS.tile_keys)
        exists = (places >= first) & (places < end)
        blocks = tl.load(table + places // TRAITS.block_size, mask=exists, other=0).to(tl.int64)
        offsets = (places % TRAITS.block_size).to(tl.int64)

        slots = blocks * key_strides[0] + offsets * key_strides[1] + kv_head * key_strides[2]
        mask = exists[None, :] & (k_columns < TRAITS.k_dim)
        keys = tl.load(cache.key + slots[None, :] + k_columns, mask=mask, other=0.0)
        scores = tl.dot(query, keys, input_precision="ieee") * scale
        if TRAITS.softcap > 0:
            scores = _tanh(scores) * TRAITS.softcap
        visible = (places[None, :] >= seen_from) & (places[None, :] <= positions[:, None])
        scores = tl.where(visible & exists[None, :], scores, float("-inf"))

        highest = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(highest == float("-inf"), 0.0, highest)  # none may have been seen yet
        masses = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        mass = mass * decay + tl.sum(masses, axis=1)
        slots = blocks * value_strides[0] + offsets * value_strides[1] + kv_head * value_strides[2]
        mask = exists[:, None] & (v_columns < TRAITS.v_dim)
        values = tl.load(cache.value + slots[:, None] + v_columns, mask=mask, other=0.0)
        output = output * decay[:, None]
        output = tl.dot(masses.to(values.dtype), values, output, input_precision="ieee")
        top = highest
    return top, mass, output


@triton.jit(do_not_specialize=["num_sequences"])
def attend_tiles(
    output, query, query_strides, sinks, cache, step, num_sequences, scale, TRAITS: tl.constexpr
):
    """Any step: output [T, Hq, V]. Programs over (tiles of queries, KV heads).

    A tile has tile_rows // group queries of one sequence. `sinks` [Hq] or None.
    """
    TILE_QUERIES: tl.constexpr = TRAITS.tile_rows // TRAITS.group
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of(tile, step.query_starts, num_sequences, TILE_QUERIES)
    start = tl.load(step.query_starts + sequence)
    query_len = tl.load(step.query_starts + sequence + 1) - start
    first_query = (tile - start // TILE_QUERIES - sequence) * TILE_QUERIES
    if first_query >= query_len:
        return

    numbers = tl.arange(0, TRAITS.tile_rows)
    queries = first_query + numbers // TRAITS.group
    exists = (numbers < TILE_QUERIES * TRAITS.group) & (queries < query_len)
    heads = kv_head * TRAITS.group + numbers % TRAITS.group
    rows = (start + queries).to(tl.int64)
    if sinks is None:
        top = tl.full([TRAITS.tile_rows], float("-inf"), dtype=tl.float32)
        mass = tl.full([TRAITS.tile_rows], 0.0, dtype=tl.float32)
    else:
        top = _load_sinks(sinks, heads, exists)
        mass = tl.full([TRAITS.tile_rows], 1.0, dtype=tl.float32)

    seq_len = tl.load(step.seq_lens + sequence)
    table = step.block_tables + sequence.to(tl.int64) * step.table_stride
    table = table - tl.load(step.first_blocks + sequence)
    first = _first_seen(seq_len + first_query, TRAITS)
    end = seq_len + tl.minimum(first_query + TILE_QUERIES, query_len)
    queried = _load_queries(query, query_strides, rows, heads, exists, cache, TRAITS)
    _, mass, attended = _attend_keys(
        queried, seq_len + queries, first, end, top, mass, cache, kv_head, table, scale, TRAITS
    )

    attended = attended / tl.where(mass == 0, 1.0, mass)[:, None]  # 0: a row that isn't there
    columns = tl.arange(0, TRAITS.v_pad)[None, :]
    places = (rows * (tl.num_programs(1) * TRAITS.group) + heads)[:, None] * TRAITS.v_dim + columns
    mask = exists[:, None] & (columns < TRAITS.v_dim)
    tl.store(output + places, attended.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits"])
def attend_splits(
    partial, tops, query, query_strides, cache, step, num_splits, scale, TRAITS: tl.constexpr
):
    """One query a sequence, or none; its keys in parts. Programs over (S, KV heads, splits).

    Writes what each part gives by itself, partial [S, Hq, splits, V] float32, and its mass, tops
    [S, Hq, splits] float32, as a logarithm: -inf where there are more parts than keys.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(step.query_starts + sequence)
    if tl.load(step.query_starts + sequence + 1) == row:
        return

    position = tl.load(step.seq_lens + sequence)
    table = step.block_tables + sequence.to(tl.int64) * step.table_stride
    table = table - tl.load(step.first_blocks + sequence)
    first = _first_seen(position, TRAITS)
    first_tile = first // TRAITS.tile_keys
    split_tiles = tl.cdiv(tl.cdiv(position + 1, TRAITS.tile_keys) - first_tile, num_splits)
    begin = (first_tile + split * split_tiles) * TRAITS.tile_keys
    end = tl.minimum(begin + split_tiles * TRAITS.tile_keys, position + 1)

    numbers = tl.arange(0, TRAITS.tile_rows)
    exists = numbers < TRAITS.group
    heads = kv_head * TRAITS.group + numbers
    rows = (numbers * 0 + row).to(tl.int64)
    top = tl.full([TRAITS.tile_rows], float("-inf"), dtype=tl.float32)
    mass = tl.full([TRAITS.tile_rows], 0.0, dtype=tl.float32)
    queried = _load_queries(query, query_strides, rows, heads, exists, cache, TRAITS)
    positions = numbers * 0 + position
    begin = tl.maximum(first, begin)
    top, mass, attended = _attend_keys(
        queried, positions, begin, end, top, mass, cache, kv_head, table, scale, TRAITS
    )

    mass = tl.where(mass == 0, 1.0, mass)  # of an empty part: top is -inf, attended is 0
    parts = (sequence * tl.num_programs(1) * TRAITS.group + heads).to(tl.int64)
    parts = parts * num_splits + split
    tl.store(tops + parts, top + tl.log2(mass), mask=exists)
    columns = tl.arange(0, TRAITS.v_pad)[None, :]
    places = parts[:, None] * TRAITS.v_dim + columns
    attended = attended / mass[:, None]
    tl.store(partial + places, attended, mask=exists[:, None] & (columns < TRAITS.v_dim))


@triton.jit(do_not_specialize=["num_splits"])
def combine_splits(
    output,
    partial,
    tops,
    sinks,
    query_starts,
    num_splits,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    """What `attend_splits` wrote, and sinks -> output [T, Hq, V]. Programs over (S, Hq)."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) == row:
        return

    splits = tl.arange(0, SPLITS_PAD)
    is_split = splits < num_splits
    parts = (sequence * tl.num_programs(1) + head).to(tl.int64) * num_splits + splits
    part_tops = tl.load(tops + parts, mask=is_split, other=float("-inf"))
    top = tl.max(part_tops, axis=0)  # finite: a query sees itself
    sink_mass = 0.0
    if sinks is not None:
        sink = _load_sinks(sinks, head, True)
        top = tl.maximum(top, sink)
        sink_mass = tl.exp2(sink - top)
    masses = tl.exp2(part_tops - top)

    columns = tl.arange(0, V_PAD)
    mask = is_split[:, None] & (columns < V_DIM)[None, :]
    values = tl.load(partial + parts[:, None] * V_DIM + columns[None, :], mask=mask, other=0.0)
    attended = tl.sum(values * masses[:, None], axis=0) / (tl.sum(masses, axis=0) + sink_mass)
    places = (row.to(tl.int64) * tl.num_programs(1) + head) * V_DIM + columns
    tl.store(output + places, attended.to(output.dtype.element_ty), mask=columns < V_DIM)
