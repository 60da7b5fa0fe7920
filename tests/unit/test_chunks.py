"""Chunks of tokens: blocks before the current one are given back, and prefixes may end with one."""

import pytest

from runtime.scheduling.cache_layout import window_blocks
from tests.scheduling import Chunk, make_scheduler, make_sequence
from tests.steps import (
    OracleRun,
    assert_right,
    drain,
    finish,
    num_cached,
    num_used,
    squeeze,
    step,
)

pytestmark = pytest.mark.unit

# As in Llama 4, whose chunks are of 8,192 tokens.
LLAMA = (0, Chunk(8192), Chunk(8192), Chunk(8192))
PROMPT = range(1, 65)


def test_64k_tokens_on_llama_cost_a_third_of_full_attention() -> None:
    num_tokens, num_decoded = 1 << 16, 32
    scheduler = make_scheduler(
        num_blocks=8192, block_size=16, windows=LLAMA, max_num_batched_tokens=2048
    )
    scheduler.add(make_sequence(1, range(num_tokens - num_decoded), max_tokens=num_decoded))
    most = 0
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output is not None
        most = max(most, num_used(scheduler))
        finish(scheduler, output)
    assert most < len(LLAMA) * num_tokens // 16 * 0.37


@pytest.mark.parametrize("chunk", [8, 10])
@pytest.mark.parametrize("budget", [4, 6, 20])
def test_blocks_of_chunks_that_are_over_are_given_back(chunk: int, budget: int) -> None:
    scheduler = make_scheduler(block_size=4, windows=(Chunk(chunk),), max_num_batched_tokens=budget)
    sequence = make_sequence(1, PROMPT, max_tokens=30)
    scheduler.add(sequence)
    while scheduler.has_work:
        place = sequence.num_computed_tokens
        output = scheduler.schedule()
        assert output is not None
        for change in output.changed:
            assert change.first_blocks == (place // chunk * chunk // 4,)
        assert num_used(scheduler) <= window_blocks(chunk, budget, 4)
        finish(scheduler, output)
    assert len(sequence.token_ids) == 64 + 30


def test_a_hit_needs_the_blocks_of_its_last_chunk_alone() -> None:
    scheduler = make_scheduler(
        num_blocks=64, block_size=4, windows=(0, Chunk(16)), max_num_batched_tokens=8
    )
    scheduler.add(make_sequence(1, PROMPT[:60], max_tokens=1))
    drain(scheduler)
    assert num_cached(scheduler, PROMPT[:60]) == 60
    assert num_cached(scheduler, PROMPT[:40]) == 40
    squeeze(scheduler, 48 // 4)  # what was over when the last chunk began
    assert num_cached(scheduler, PROMPT[:60]) == 60
    assert num_cached(scheduler, PROMPT[:44]) == 32  # where a chunk ends, none of its blocks count
    assert num_cached(scheduler, PROMPT[:15]) == 0


def test_a_hit_that_ends_with_a_chunk_holds_none_of_its_blocks() -> None:
    windows = (0, Chunk(16))
    run = OracleRun(
        make_scheduler(num_blocks=64, block_size=4, windows=windows, max_num_batched_tokens=8)
    )
    first = make_sequence(1, PROMPT[:52], max_tokens=1)
    run.finish(first)
    squeeze(run.scheduler, 48 // 4)  # all of the chunks that are over
    again = make_sequence(2, [*PROMPT[:48], 7], max_tokens=20, seed=2, ignore_eos=True)
    run.scheduler.add(again)
    (change,) = run.step().changed
    assert change.first_blocks == (0, 12)
    assert [len(blocks) for blocks in change.appended] == [13, 1]
    run.finish()
    assert again.num_cached_tokens == 48
    assert_right([first, again], windows=windows)


def test_the_last_token_is_computed_though_its_chunk_is_new() -> None:
    scheduler = make_scheduler(
        num_blocks=64, block_size=4, windows=(0, Chunk(16)), max_num_batched_tokens=64
    )
    for sequence_id in (1, 2):
        sequence = make_sequence(sequence_id, PROMPT[:33], max_tokens=1)
        scheduler.add(sequence)
        (scheduled,) = step(scheduler).scheduled
    assert (scheduled.num_computed_tokens, scheduled.num_scheduled_tokens) == (32, 1)


def test_a_shorter_hit_is_found_where_chunks_of_two_lengths_end() -> None:
    windows = (0, Chunk(8), Chunk(12))
    scheduler = make_scheduler(
        num_blocks=96, block_size=4, windows=windows, max_num_batched_tokens=8
    )
    scheduler.add(make_sequence(1, PROMPT, max_tokens=1))
    drain(scheduler)
    squeeze(scheduler, 56 // 4 + 48 // 4)  # all of the chunks that were over before the last step
    assert [num_cached(scheduler, PROMPT[:end]) for end in (60, 47, 24, 23)] == [60, 24, 24, 0]


def test_a_fork_starts_where_a_chunk_does_though_its_source_goes_on() -> None:
    windows = (0, Chunk(8))
    run = OracleRun(make_scheduler(block_size=4, windows=windows, max_num_seqs=2))
    blocker = make_sequence(9, [3] * 5, max_tokens=12, ignore_eos=True)
    source = make_sequence(1, range(1, 18), max_tokens=20, ignore_eos=True)
    fork = source.fork(2, seed=5)
    run.finish(blocker, source)
    assert fork.num_output_tokens == 20
    assert_right([blocker, source, fork], windows=windows)
