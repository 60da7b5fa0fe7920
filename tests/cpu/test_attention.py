"""The reference backend against a plain softmax, and the metadata it gets."""

import pytest
import torch

from tests.tiny_models import Row, make_batch
from workers.attention.base import build_metadata
from workers.attention.reference import ReferenceAttention
from workers.errors import ModelError
from workers.kv_cache import LayerCache
from workers.layers.paged_attention import find_window

pytestmark = pytest.mark.cpu

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def plain_attention(query, key, value, *, scale, window, softcap):
    """One sequence, query [L, Hq, K]: every query sees the keys up to its own place."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(len(query))
    hidden = place[:, None] < place
    if window:
        hidden |= place[:, None] - place >= window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize("window", [0, 1, 3, 6])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_paged_attention_equals_plain_attention(window, softcap):
    """Two sequences, 4 heads over 2 KV heads, K and V of different widths, fed in pieces."""
    generator = torch.Generator().manual_seed(0)
    lengths, tables = (13, 9), ([5, 0, 7, 2], [3, 6, 1])
    texts = [
        [torch.randn(length, heads, dim, generator=generator) for heads, dim in SHAPES]
        for length in lengths
    ]
    cache = LayerCache(
        torch.full((8, BLOCK_SIZE, 2, 6), 1e9), torch.full((8, BLOCK_SIZE, 2, 5), 1e9)
    )
    settings = {"scale": 0.4, "window": window, "softcap": softcap}
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
        (metadata,) = build_metadata(batch, block_size=BLOCK_SIZE, device=CPU)

        output = ReferenceAttention().attend(*parts, cache, metadata, **settings)

        assert output.is_contiguous()
        for i, piece in enumerate(output.split([end - start for start, end in pieces])):
            found[i].append(piece)

    for i in range(2):
        expected = plain_attention(*texts[i], **settings)
        assert torch.allclose(torch.cat(found[i]), expected, atol=1e-5)


SHAPES = ((4, 6), (2, 6), (2, 5))  # heads and width of query, key, value


def test_blocks_before_the_window_are_not_read():
    cache = LayerCache(torch.zeros(4, BLOCK_SIZE, 1, 2), torch.zeros(4, BLOCK_SIZE, 1, 2))
    cache.key[0], cache.value[0] = float("nan"), float("nan")
    batch = make_batch([Row(sequence_id=1, tokens=[0], seq_len=9, block_tables=[[0, 1, 2]])])
    (metadata,) = build_metadata(batch, block_size=BLOCK_SIZE, device=CPU)
    one = torch.ones(1, 1, 2)

    output = ReferenceAttention().attend(
        one, one, one, cache, metadata, scale=1.0, window=6, softcap=0.0
    )

    assert output.isfinite().all()


@pytest.mark.parametrize("window", [1, 4, 5, 6])
def test_a_table_may_start_at_the_first_block_that_is_seen(window):
    """One sequence feeds a chunk at 9 tokens, the other one token at 14, in blocks of 4."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(4, heads, dim, generator=generator) for heads, dim in SHAPES]
    cached = [torch.randn(8, BLOCK_SIZE, *shape, generator=generator) for shape in SHAPES[1:]]
    pieces = (([5, 0, 7], 9, 3), ([3, 6, 1, 2], 14, 1))

    def attend(*, drop: bool) -> tuple[torch.Tensor, LayerCache, list[int]]:
        rows = []
        for number, (table, seq_len, query_len) in enumerate(pieces):
            first = max(0, seq_len + 1 - window) // BLOCK_SIZE if drop else 0
            row = Row(
                sequence_id=number,
                tokens=[0] * query_len,
                seq_len=seq_len,
                block_tables=[table[first:]],
                first_blocks=[first],
            )
            rows.append(row)
        (metadata,) = build_metadata(make_batch(rows), block_size=BLOCK_SIZE, device=CPU)
        cache = LayerCache(*(tensor.clone() for tensor in cached))
        output = ReferenceAttention().attend(
            *parts, cache, metadata, scale=0.4, window=window, softcap=0.0
        )
        return output, cache, metadata.first_blocks.tolist()

    whole, cache, _ = attend(drop=False)
    output, same_cache, first_blocks = attend(drop=True)

    assert min(first_blocks) > 0
    assert output.equal(whole)
    assert cache.key.equal(same_cache.key)
    assert cache.value.equal(same_cache.value)


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

    first, second = build_metadata(batch, block_size=16, device=CPU)

    assert first.slots.tolist() == [112, 113, 114, 115, 5 * 16 + 42 - 32]
    assert second.slots.tolist() == [144, 145, 146, 147, 3 * 16 + 10]
    assert first.query_starts.tolist() == [0, 4, 5]
    assert first.query_lens.tolist() == [4, 1]
    assert first.seq_lens.tolist() == [0, 42]
    assert first.block_tables.tolist() == [[7, 0, 0], [12, 23, 5]]
    assert second.block_tables.tolist() == [[9, 0], [2, 3]]
    assert [first.first_blocks.tolist(), second.first_blocks.tolist()] == [[0, 0], [0, 1]]
    assert first.extents == ((0, 4), (42, 1))


def causal(batch, head, query, key):
    return key <= query


@pytest.mark.parametrize("window", [1, 2, 5, 99])
def test_a_window_is_found_in_the_mask_rule(window):
    def windowed(batch, head, query, key):
        return (key <= query) & (key > query - window)

    assert find_window(windowed, 100, CPU) == window
    assert find_window(windowed, window, CPU) == 0


def test_a_causal_rule_has_no_window():
    assert find_window(causal, 100, CPU) == 0


@pytest.mark.parametrize(
    "rule",
    [
        lambda batch, head, query, key: key >= 0,
        lambda batch, head, query, key: (key <= query) & (key // 8 == query // 8),
        lambda batch, head, query, key: (key <= query) & ((key > query - 4) | (key < 2)),
        lambda batch, head, query, key: (key <= query) & (key % 2 == query % 2),
        lambda batch, head, query, key: (query - key).abs() < 5,
    ],
    ids=["all", "chunks", "sinks", "strided", "both-ways"],
)
def test_other_rules_are_refused(rule):
    with pytest.raises(ModelError, match="neither causal nor"):
        find_window(rule, 100, CPU)
