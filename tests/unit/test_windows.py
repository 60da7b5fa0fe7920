"""Sliding windows: blocks behind them are given back, and a prefix needs the window alone."""

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
    shares,
    squeeze,
    step,
)

pytestmark = pytest.mark.unit

GEMMA = (0, 512, 512, 512, 512, 512)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_32k_tokens_on_gemma_cost_under_a_quarter_of_full_attention(prefix_cache: bool) -> None:
    num_tokens, num_decoded = 32768, 64
    scheduler = make_scheduler(
        num_blocks=4096,
        block_size=16,
        windows=GEMMA,
        max_num_batched_tokens=512,
        prefix_cache=prefix_cache,
    )
    scheduler.add(make_sequence(1, range(num_tokens - num_decoded), max_tokens=num_decoded))
    while scheduler.has_work:
        output = scheduler.schedule()
        assert output is not None
        assert num_used(scheduler) < len(GEMMA) * num_tokens // 16 / 4
        finish(scheduler, output)


def test_blocks_behind_the_window_are_given_back_while_a_prompt_is_fed() -> None:
    scheduler = make_scheduler(block_size=4, windows=(8,), max_num_batched_tokens=8)
    sequence = make_sequence(1, range(64))
    scheduler.add(sequence)
    while sequence.num_computed_tokens < 64:
        num_computed = sequence.num_computed_tokens
        output = scheduler.schedule()
        (change,) = output.changed
        # The next token sees the seven before it.
        assert change.first_blocks == (max(0, num_computed - 7) // 4,)
        assert num_used(scheduler) <= window_blocks(8, 8, 4)
        finish(scheduler, output)


def test_blocks_behind_the_window_are_given_back_while_decoding() -> None:
    scheduler = make_scheduler(block_size=4, windows=(8,), max_num_batched_tokens=8)
    scheduler.add(make_sequence(1, range(64), max_tokens=40))
    while scheduler.running.behind or len(scheduler.waiting):
        step(scheduler)
    used = []
    for _ in range(32):
        step(scheduler)
        used.append(num_used(scheduler))
    # Eight tokens touch at most three blocks; the window moves on at block edges.
    assert set(used[4:]) == {3}


def test_admission_charges_a_window_and_a_chunk() -> None:
    scheduler = make_scheduler(
        num_blocks=40, block_size=4, windows=(0, 8, 16), max_num_batched_tokens=12
    )
    sequence = make_sequence(1, range(80))
    scheduler.add(sequence)
    step(scheduler)
    assert num_used(scheduler) == 20 + window_blocks(8, 12, 4) + window_blocks(16, 12, 4)
    assert num_used(scheduler) == 20 + 6 + 8


def test_a_prompt_runs_that_full_attention_has_no_room_for() -> None:
    run = OracleRun(
        make_scheduler(num_blocks=6, block_size=4, windows=(8,), max_num_batched_tokens=8)
    )
    sequence = make_sequence(1, range(1, 200), max_tokens=20)
    run.finish(sequence)
    assert sequence.num_preemptions == 0
    assert_right([sequence], windows=(8,))


def test_blocks_behind_a_window_are_evicted_before_all_others() -> None:
    scheduler = make_scheduler(
        num_blocks=64, block_size=4, windows=(0, 8), max_num_batched_tokens=8
    )
    short, long = range(100, 108), range(1, 65)
    scheduler.add(make_sequence(1, short, max_tokens=1))
    step(scheduler)
    scheduler.add(make_sequence(2, long, max_tokens=8))
    while scheduler.running.behind or len(scheduler.waiting):
        step(scheduler)
    # 16 blocks of its second group, less those that the last chunk still saw.
    num_behind = (56 - 7) // 4
    squeeze(scheduler, num_behind)
    scheduler.check_invariants()
    assert num_cached(scheduler, short) == 8
    squeeze(scheduler, 1)
    assert num_cached(scheduler, short) < 8


def test_a_hit_needs_all_full_blocks_and_the_window_alone() -> None:
    scheduler = make_scheduler(
        num_blocks=64, block_size=4, windows=(0, 8), max_num_batched_tokens=8
    )
    prompt = range(1, 65)
    scheduler.add(make_sequence(1, prompt, max_tokens=1))
    drain(scheduler)
    assert num_cached(scheduler, prompt) == 64
    assert num_cached(scheduler, prompt[:32]) == 32
    squeeze(scheduler, (56 - 7) // 4)  # what was behind the window at the end
    assert num_cached(scheduler, prompt) == 64
    assert num_cached(scheduler, prompt[:32]) == 0
    squeeze(scheduler, 1)  # the last block of the full group
    assert num_cached(scheduler, prompt) == 60


def test_a_hit_holds_the_blocks_that_its_next_token_sees() -> None:
    scheduler = make_scheduler(
        num_blocks=64, block_size=4, windows=(0, 8), max_num_batched_tokens=8
    )
    prompt = range(1, 65)
    scheduler.add(make_sequence(1, prompt, max_tokens=1))
    drain(scheduler)
    scheduler.add(make_sequence(2, [*prompt, 7], max_tokens=4))
    output = step(scheduler)
    assert shares(output) == [(2, 1)]
    (change,) = output.changed
    assert change.first_blocks == (0, (64 - 7) // 4)
    assert [len(blocks) for blocks in change.appended] == [17, 3]


@pytest.mark.parametrize(
    "windows", [(0, 8), (6,), (0, 5, 12), (3, 9), (0, 1), (0, Chunk(8)), (0, Chunk(10), 5)]
)
@pytest.mark.parametrize("num_blocks", [24, 40])
def test_outputs_are_right_over_windows_hits_and_evictions(
    windows: tuple[int, ...], num_blocks: int
) -> None:
    run = OracleRun(
        make_scheduler(
            num_blocks=num_blocks * len(windows),
            block_size=4,
            windows=windows,
            max_num_batched_tokens=10,
            max_num_seqs=4,
        )
    )
    prompts = [list(range(1, length)) for length in (40, 23, 12, 60, 37, 60, 9, 44)]
    sequences = [
        make_sequence(index, prompt, max_tokens=14, seed=index)
        for index, prompt in enumerate(prompts)
    ]
    run.finish(*sequences)
    assert any(each.num_cached_tokens for each in sequences)
    assert_right(sequences, windows=windows)
