"""Behaviours that other engines have been seen to lack, by name."""

import random
from collections.abc import Callable

import pytest

from runtime.request import FinishReason
from runtime.scheduling.admission import MAX_OVERTAKEN
from runtime.scheduling.output import SchedulerOutput
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence, Status
from tests.scheduling import EOS, make_scheduler, make_sequence
from tests.steps import MAX_STEPS, OracleRun, assert_right, drain, finish, ids, shares, step

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("max_tokens", [8, 40, 200])
@pytest.mark.parametrize("num_decoders", [1, 4, 7])
@pytest.mark.parametrize("budget", [8, 16, 64])
def test_a_prompt_of_most_of_the_pool_is_preempted_at_most_once(
    budget: int, num_decoders: int, max_tokens: int
) -> None:
    scheduler = make_scheduler(
        num_blocks=100, block_size=4, max_num_batched_tokens=budget, prefix_cache=False
    )
    for sequence_id in range(num_decoders):
        scheduler.add(make_sequence(sequence_id, [sequence_id] * 4, max_tokens=max_tokens))
    step(scheduler)
    large = make_sequence(100, range(320), max_tokens=8)
    scheduler.add(large)
    drain(scheduler)
    assert large.finish_reason is FinishReason.LENGTH
    assert large.num_preemptions <= 1


def serve_among_decoders(budget: int, seed: int, *, more_come: bool) -> Sequence:
    """A prompt that fills 80 % of the pool comes while others decode."""
    draw = random.Random(seed).randint
    scheduler = make_scheduler(
        num_blocks=100, block_size=4, max_num_batched_tokens=budget, prefix_cache=False
    )
    num_decoders = draw(1, 7)
    for sequence_id in range(num_decoders):
        prompt = [sequence_id] * draw(1, 8)
        scheduler.add(make_sequence(sequence_id, prompt, max_tokens=draw(4, 72)))
    for _ in range(draw(1, 20)):
        step(scheduler)
    large = make_sequence(100, range(320), max_tokens=8)
    scheduler.add(large)
    for sequence_id in range(101, MAX_STEPS):
        if large.status is Status.FINISHED:
            return large
        if more_come and len(scheduler.running) + len(scheduler.waiting) <= num_decoders:
            scheduler.add(make_sequence(sequence_id, [1] * 4, max_tokens=draw(4, 72)))
        step(scheduler)
    raise AssertionError("no progress")


@pytest.mark.parametrize("more_come", [False, True])
@pytest.mark.parametrize("budget", [8, 16, 64])
def test_a_prompt_of_most_of_the_pool_is_seldom_preempted_and_at_most_once(
    budget: int, more_come: bool
) -> None:
    counts = [
        serve_among_decoders(budget, seed, more_come=more_come).num_preemptions
        for seed in range(30)
    ]
    assert max(counts) <= 1
    # Admission leaves room for what the others grow by while the prompt is fed: without it, about
    # half of the prompts were preempted.
    assert sum(counts) <= (10 if budget == 64 else 5)


def test_ten_queued_progress_while_their_head_does_not_fit() -> None:
    scheduler = make_scheduler(num_blocks=20, block_size=4, max_num_batched_tokens=64)
    for sequence_id in (1, 2):  # 6 blocks each now, 8 in the end
        scheduler.add(make_sequence(sequence_id, [sequence_id] * 16, max_tokens=16))
    for _ in range(8):
        step(scheduler)
    head = make_sequence(3, [3] * 40, max_tokens=4)
    small = [make_sequence(sequence_id, [1, 2], max_tokens=2) for sequence_id in range(4, 13)]
    for sequence in (head, *small):
        scheduler.add(sequence)
    assert head.status is Status.WAITING
    assert [each for each, _ in shares(step(scheduler))][:4] == [1, 2, 4, 5]
    drain(scheduler)
    assert all(each.finish_reason is FinishReason.LENGTH for each in (head, *small))


def test_a_head_that_does_not_fit_is_not_overtaken_for_ever() -> None:
    scheduler = make_scheduler(num_blocks=20, block_size=4, max_num_batched_tokens=64)
    scheduler.add(make_sequence(0, [9] * 5, max_tokens=40))
    step(scheduler)
    head = make_sequence(1, [1] * 76, max_tokens=4)
    scheduler.add(head)
    for sequence_id in range(2, 2 + 4 * MAX_OVERTAKEN):
        scheduler.add(make_sequence(sequence_id, [2, 3], max_tokens=3))
    overtaken = 0
    while head.status is Status.WAITING:
        overtaken = head.num_overtaken
        step(scheduler)
    assert overtaken == MAX_OVERTAKEN
    assert len(scheduler.waiting) >= 2 * MAX_OVERTAKEN
    drain(scheduler)


def test_two_with_the_same_prefix_admitted_in_one_step_share_nothing_and_are_right() -> None:
    run = OracleRun(make_scheduler(block_size=4))
    pool = run.scheduler.cache.pool
    prefix = list(range(1, 9))
    first, second = make_sequence(1, [*prefix, 20], seed=1), make_sequence(2, [*prefix, 21], seed=2)
    run.scheduler.add(first)
    run.scheduler.add(second)
    run.step()
    assert pool.num_free == pool.num_blocks - 6
    assert first.num_cached_tokens == second.num_cached_tokens == 0
    third = make_sequence(3, [*prefix, 22], seed=3)
    run.finish(third)
    assert third.num_cached_tokens == 8
    # The second copies of the two blocks keep nothing, for they would never be found.
    assert pool.num_cached < 2 + 3 * -(-9 // 4)
    assert_right([first, second, third])


def test_a_second_copy_of_a_prefix_is_not_kept() -> None:
    scheduler = make_scheduler(block_size=4)
    for sequence_id in (1, 2):
        scheduler.add(make_sequence(sequence_id, range(1, 9), max_tokens=1))
    step(scheduler)
    assert not scheduler.has_work
    assert scheduler.cache.pool.num_cached == 2


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_a_fully_cached_prompt_of_whole_blocks_computes_its_last_block(num_blocks: int) -> None:
    run = OracleRun(make_scheduler(block_size=4))
    prompt = list(range(1, 4 * num_blocks + 1))
    first, again = make_sequence(1, prompt, seed=1), make_sequence(2, prompt, seed=2)
    run.finish(first)
    run.scheduler.add(again)
    assert shares(run.step()) == [(2, 4)]
    assert again.num_cached_tokens == len(prompt) - 4
    run.finish()
    assert_right([first, again])


def test_a_fully_cached_prompt_one_token_past_a_block_computes_that_token() -> None:
    run = OracleRun(make_scheduler(block_size=4))
    first, again = (make_sequence(each, range(1, 10), seed=each) for each in (1, 2))
    run.finish(first)
    run.scheduler.add(again)
    assert shares(run.step()) == [(2, 1)]
    run.finish()
    assert_right([first, again])


@pytest.mark.parametrize("digest", [b"", b"\0" * 32])
def test_a_constant_hash_function_changes_no_output(digest: bytes) -> None:
    run = OracleRun(make_scheduler(block_size=2, hash_fn=lambda data: digest))
    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [1, 2, 1, 2, 1, 2, 1], [3, 4, 5]]
    sequences = [
        make_sequence(10 * turn + index, prompt, seed=index, cache_salt=salt)
        for turn, salt in enumerate(["", "a", "", "b"])
        for index, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        run.finish(sequence)
    assert sum(each.num_cached_tokens for each in sequences) > 0
    run.finish(*(make_sequence(100 + index, prompt) for index, prompt in enumerate(prompts)))
    assert_right(sequences)


def test_min_tokens_larger_than_the_room_left_ends_with_length() -> None:
    scheduler = make_scheduler(max_model_len=6)
    sequence = make_sequence(1, [1, 2, 3], max_tokens=100, min_tokens=50)
    scheduler.add(sequence)
    for _ in range(3):
        step(scheduler, token=EOS)
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.num_tokens == 6


def held(scheduler: Scheduler) -> Sequence:
    source = make_sequence(1, [1, 2])
    fork = source.fork(2, seed=1)
    scheduler.add(source)
    return fork


def waiting(scheduler: Scheduler) -> Sequence:
    sequence = make_sequence(1, [1, 2])
    scheduler.add(sequence)
    return sequence


def running(scheduler: Scheduler) -> Sequence:
    sequence = waiting(scheduler)
    step(scheduler)
    return sequence


def running_behind(scheduler: Scheduler) -> Sequence:
    sequence = make_sequence(1, range(40))
    scheduler.add(sequence)
    step(scheduler)
    return sequence


def preempted(scheduler: Scheduler) -> Sequence:
    sequence = running(scheduler)
    scheduler.restart()
    return sequence


def finished(scheduler: Scheduler) -> Sequence:
    sequence = make_sequence(1, [1], max_tokens=1)
    scheduler.add(sequence)
    step(scheduler)
    return sequence


@pytest.mark.parametrize(
    ("reach", "status"),
    [
        (held, Status.HELD),
        (waiting, Status.WAITING),
        (running, Status.RUNNING),
        (running_behind, Status.RUNNING),
        (preempted, Status.WAITING),
        (finished, Status.FINISHED),
    ],
)
def test_abort_twice_in_each_state(reach: Callable[[Scheduler], Sequence], status: Status) -> None:
    scheduler = make_scheduler()
    sequence = reach(scheduler)
    assert sequence.status is status
    reason = sequence.finish_reason
    for _ in range(2):
        scheduler.abort(sequence.sequence_id)
        scheduler.check_invariants()
    assert sequence.finish_reason is (reason or FinishReason.ABORT)
    drain(scheduler)
    assert sequence.finish_reason is (reason or FinishReason.ABORT)
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks


def test_abort_of_an_unknown_id_changes_nothing() -> None:
    scheduler = make_scheduler()
    sequence = running(scheduler)
    scheduler.abort(99)
    assert shares(step(scheduler)) == [(sequence.sequence_id, 1)]


def dispatched(scheduler: Scheduler, reach: Callable[[Scheduler], Sequence]) -> SchedulerOutput:
    """A step in flight with sequence 1 and another one."""
    reach(scheduler)
    scheduler.add(make_sequence(50, [7]))
    output = scheduler.schedule()
    assert 1 in dict(shares(output))
    return output


@pytest.mark.parametrize("reach", [waiting, running, running_behind, preempted])
def test_abort_between_dispatch_and_reply_delivers_nothing_afterwards(
    reach: Callable[[Scheduler], Sequence],
) -> None:
    scheduler = make_scheduler()
    output = dispatched(scheduler, reach)
    pool = scheduler.cache.pool
    num_free = pool.num_free
    for _ in range(2):
        scheduler.abort(1)
        scheduler.check_invariants()
    assert pool.num_free == num_free  # the step in flight writes these blocks
    outcome = finish(scheduler, output)
    assert ids(outcome.sequences) == [50]
    assert outcome.finished == []
    assert pool.num_free == pool.num_blocks - 1
    after = step(scheduler)
    assert after.removed == (1,)
    assert shares(after) == [(50, 1)]
