"""Blocks that sequences share, that are copied, and that lie behind a sliding window."""

from dataclasses import replace

import pytest
import torch

from tests.families import VOCABULARY
from tests.tiny_models import (
    Feeder,
    Row,
    error_in_std,
    load_executor,
    make_batch,
    make_layout,
    save_tiny_model,
)

pytestmark = pytest.mark.cpu

NAN = float("nan")
# What is fed of each of two sequences, step by step.
CHUNKS = [(9, 0), (9, 5), (5, 6), (1, 11), *[(1, 1)] * 12]


def drop_behind_windows(feeder, row):
    """Gives blocks that no query of the step sees to somebody else, who fills them with NaN."""
    size, spec, caches = (
        feeder.layout.block_size,
        feeder.executor.spec,
        feeder.executor._cached._caches,
    )
    tables, first_blocks = [], []
    for group, table in zip(feeder.layout.groups, row.block_tables, strict=True):
        layer = spec.layers[group[0]]
        seen = max(0, row.seq_len + 1 - layer.window) if layer.window else 0
        if layer.chunk:
            seen = row.seq_len // layer.chunk * layer.chunk
        first = seen // size
        for cache in caches:
            cache.key[table[:first]], cache.value[table[:first]] = NAN, NAN
        tables.append(table[first:])
        first_blocks.append(first)
    return replace(row, block_tables=tables, first_blocks=first_blocks)


def run(executor, prepare):
    """Logits of all tokens of two sequences, and the largest first block of each cache group."""
    feeder = Feeder(executor)
    texts = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(4)).tolist()
    logits, first_blocks = [], []
    for chunks in CHUNKS:
        rows = []
        for number, count in enumerate(chunks):
            if count:
                tokens, texts[number] = texts[number][:count], texts[number][count:]
                row = feeder.row(number, tokens, sample=range(count))
                rows.append(prepare(feeder, row))
        logits.append(executor.compute_logits(make_batch(rows)))
        first_blocks += [row.first_blocks for row in rows]
    return torch.cat(logits), [max(group) for group in zip(*first_blocks, strict=True)]


@pytest.mark.parametrize(("family", "furthest"), [("gemma3", [0, 7, 7, 7]), ("mistral", [7])])
def test_logits_are_the_same_without_the_blocks_behind_the_window(tmp_path, family, furthest):
    """36 tokens in blocks of 4; windows of 7 and 6."""
    executor = load_executor(save_tiny_model(tmp_path, family), attention="reference")

    whole, _ = run(executor, lambda feeder, row: row)
    dropped, first_blocks = run(executor, drop_behind_windows)

    assert first_blocks == furthest
    assert dropped.equal(whole)


def test_a_fork_goes_on_in_a_copy_of_the_last_block(tmp_path):
    """Six tokens in blocks 3 and 4 of 4; the fork shares block 3 and writes into 9."""
    executor = load_executor(save_tiny_model(tmp_path))
    executor.allocate_cache(make_layout(executor.spec))
    text = [5, 6, 7, 8, 9, 10]
    source = Row(sequence_id=1, tokens=text, seq_len=0, block_tables=[[3, 4]])
    fork = replace(source, sequence_id=2, tokens=[12], seq_len=6, block_tables=[[3, 9]])
    executor.execute_model(make_batch([source]))

    rows = [replace(source, tokens=[11], seq_len=6), fork]
    logits = executor.compute_logits(make_batch(rows, copies=[(4, 9)]))

    alone = [
        executor.compute_logits(
            make_batch([replace(source, tokens=[*text, last], block_tables=[[20, 21]])])
        )
        for last in (11, 12)
    ]
    assert error_in_std(logits.split(1), alone) < 1e-5
