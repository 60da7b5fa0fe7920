"""The reference backend against a plain softmax, and the metadata it gets."""

import math

import pytest
import torch

from tests.plain_attention import plain_attention
from tests.tiny_models import Row, make_batch
from workers.attention.base import build_inputs, widen
from workers.attention.reference import ReferenceAttention
from workers.config import CacheLayout, LayerCacheSpec
from workers.kv_cache import LayerCache, allocate
from workers.staging import Staging

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
BLOCK_SIZE = 4


SHAPES = ((4, 6), (2, 6), (2, 5))  # heads and width of query, key, value
# (window, chunk)
REACHES = [(0, 0), (1, 0), (3, 0), (6, 0), (0, 1), (0, 3), (0, 4), (0, 8), (0, 50)]


def make_cache(num_blocks, *, heads=2, k_dim=6, v_dim=5, fill=0.0):
    """One layer's part of a pool that another layer is in too."""
    layer = LayerCacheSpec(window=0, num_kv_heads=heads, k_dim=k_dim, v_dim=v_dim, element_bytes=4)
    layout = CacheLayout(block_size=BLOCK_SIZE, num_blocks=num_blocks, groups=((0, 1),))
    caches, _ = allocate(
        [layer, layer], layout, dtype=torch.float32, device=CPU, available_bytes=1 << 20
    )
    caches[1].pool.fill_(fill)
    return caches[1]


@pytest.mark.parametrize(("window", "chunk"), REACHES)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_paged_attention_equals_plain_attention(window, chunk, softcap, has_sinks):
    """Two sequences, 4 heads over 2 KV heads, K and V of different widths, fed in pieces."""
    generator = torch.Generator().manual_seed(0)
    lengths, tables = (13, 9), ([5, 0, 7, 2], [3, 6, 1])
    texts = [
        [torch.randn(length, heads, dim, generator=generator) for heads, dim in SHAPES]
        for length in lengths
    ]
    cache = make_cache(8, fill=1e9)
    settings = {
        "scale": 0.4,
        "window": window,
        "chunk": chunk,
        "softcap": softcap,
        "sinks": torch.randn(4, generator=generator) if has_sinks else None,
    }
    found = [[], []]
    for pieces in (((0, 7), (0, 1)), ((7, 8), (1, 6)), ((8, 11), (6, 7)), ((11, 13), (7, 9))):
        batch = make_batch(
            [
                Row(
                    sequence_id=i,
                    tokens=[0] * (end - start),
                    seq_len=start,
                    block_tables=[tables[i]],
                )
                for i, (start, end) in enumerate(pieces)
            ]
        )
        parts = [
            torch.cat([texts[i][kind][start:end] for i, (start, end) in enumerate(pieces)])
            for kind in range(3)
        ]
        (metadata,) = build_inputs(batch, block_size=BLOCK_SIZE, staging=Staging(CPU)).groups

        output = ReferenceAttention().attend(*parts, cache, metadata, **settings)

        assert output.is_contiguous()
        for i, piece in enumerate(output.split([end - start for start, end in pieces])):
            found[i].append(piece)

    for i in range(2):
        expected = plain_attention(*texts[i], **settings)
        assert torch.allclose(torch.cat(found[i]), expected, atol=1e-5)


def test_a_sink_takes_its_part_and_gives_nothing():
    """One key with score 0 and value 1: the sink's part of the mass is missing."""
    cache = make_cache(1, heads=1, k_dim=2, v_dim=2)
    batch = make_batch([Row(sequence_id=1, tokens=[0], seq_len=0, block_tables=[[0]])])
    (metadata,) = build_inputs(batch, block_size=BLOCK_SIZE, staging=Staging(CPU)).groups
    sinks = torch.tensor([0.0, float("-inf"), math.log(3)], dtype=torch.float64)

    output = ReferenceAttention().attend(
        torch.zeros(1, 3, 2),
        torch.ones(1, 1, 2),
        torch.ones(1, 1, 2),
        cache,
        metadata,
        **PLAIN | {"sinks": sinks},
    )

    assert torch.allclose(output[0, :, 0], torch.tensor([1 / 2, 1.0, 1 / 4]))
    assert output.dtype == torch.float32


PLAIN = {"scale": 1.0, "window": 0, "chunk": 0, "softcap": 0.0, "sinks": None}


@pytest.mark.parametrize("reach", [{"window": 6}, {"chunk": 4}, {"chunk": 8}])
def test_blocks_before_what_is_seen_are_not_read(reach):
    cache = make_cache(4, heads=1, k_dim=2, v_dim=2)
    cache.pool[0] = float("nan")
    batch = make_batch([Row(sequence_id=1, tokens=[0], seq_len=9, block_tables=[[0, 1, 2]])])
    (metadata,) = build_inputs(batch, block_size=BLOCK_SIZE, staging=Staging(CPU)).groups
    one = torch.ones(1, 1, 2)

    output = ReferenceAttention().attend(one, one, one, cache, metadata, **PLAIN | reach)

    assert output.isfinite().all()


@pytest.mark.parametrize(
    ("window", "chunk"), [(1, 0), (4, 0), (5, 0), (6, 0), (0, 4), (0, 5), (0, 7), (0, 8)]
)
def test_a_table_may_start_at_the_first_block_that_is_seen(window, chunk):
    """One sequence feeds a chunk at 9 tokens, the other one token at 14, in blocks of 4."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(4, heads, dim, generator=generator) for heads, dim in SHAPES]
    cached = torch.randn(make_cache(8).pool.shape, generator=generator)
    pieces = (([5, 0, 7], 9, 3), ([3, 6, 1, 2], 14, 1))

    def attend(*, drop: bool) -> tuple[torch.Tensor, LayerCache, list[int]]:
        rows = []
        for number, (table, seq_len, query_len) in enumerate(pieces):
            seen = seq_len // chunk * chunk if chunk else max(0, seq_len + 1 - window)
            first = seen // BLOCK_SIZE if drop else 0
            row = Row(
                sequence_id=number,
                tokens=[0] * query_len,
                seq_len=seq_len,
                block_tables=[table[first:]],
                first_blocks=[first],
            )
            rows.append(row)
        (metadata,) = build_inputs(
            make_batch(rows), block_size=BLOCK_SIZE, staging=Staging(CPU)
        ).groups
        cache = make_cache(8)
        cache.pool.copy_(cached)
        output = ReferenceAttention().attend(
            *parts, cache, metadata, **PLAIN | {"window": window, "chunk": chunk}
        )
        return output, cache, metadata.first_blocks.tolist()

    whole, cache, _ = attend(drop=False)
    output, same_cache, first_blocks = attend(drop=True)

    assert min(first_blocks) > 0
    assert output.equal(whole)
    assert cache.pool.equal(same_cache.pool)


def test_metadata_of_the_batch_of_the_architecture_page():
    """Sequence 7 is new in block 7; sequence 8 holds 42 tokens in blocks 12, 23, 5."""
    batch = make_batch(
        [
            Row(sequence_id=7, tokens=[101, 872, 2304, 1198], seq_len=0, block_tables=[[7], [9]]),
            Row(
                sequence_id=8,
                tokens=[345],
                seq_len=42,
                block_tables=[[12, 23, 5], [2, 3]],
                first_blocks=[0, 1],
            ),
        ]
    )

    first, second = build_inputs(batch, block_size=16, staging=Staging(CPU)).groups

    assert first.slot_blocks.tolist() == [7, 7, 7, 7, 5]
    assert second.slot_blocks.tolist() == [9, 9, 9, 9, 3]
    assert first.slot_offsets.tolist() == second.slot_offsets.tolist() == [0, 1, 2, 3, 42 - 32]
    assert first.query_starts.tolist() == [0, 4, 5]
    assert first.query_lens.tolist() == [4, 1]
    assert first.seq_lens.tolist() == [0, 42]
    assert first.block_tables.tolist() == [[7, 0, 0], [12, 23, 5]]
    assert second.block_tables.tolist() == [[9, 0], [2, 3]]
    assert [first.first_blocks.tolist(), second.first_blocks.tolist()] == [[0, 0], [0, 1]]
    assert first.extents == [[0, 4], [42, 1]]


@pytest.mark.parametrize(("width", "wanted"), [(1, 16), (15, 16), (16, 16), (17, 32)])
def test_tables_on_a_device_are_of_one_class(width, wanted):
    tables = torch.arange(3 * width, dtype=torch.int32).view(3, width)

    widened = widen(tables)

    assert widened.shape == (3, wanted)
    assert widened[:, :width].equal(tables)
    assert widened.is_contiguous()
