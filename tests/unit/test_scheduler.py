import pytest

from runtime.errors import WorkerError
from runtime.request import FinishReason
from runtime.scheduling.policy import PriorityPolicy
from runtime.scheduling.sequence import Status
from runtime.scheduling.step_plan import StepResult
from tests.scheduling import EOS, make_scheduler, make_sequence
from tests.steps import drain, shares, step

pytestmark = pytest.mark.unit


def test_a_prompt_longer_than_the_budget_is_fed_in_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_sequence(1, range(1, 21)))
    outputs = [step(scheduler) for _ in range(4)]
    assert [shares(output) for output in outputs] == [[(1, 8)], [(1, 8)], [(1, 4)], [(1, 1)]]
    assert [output.scheduled[0].num_computed_tokens for output in outputs[:3]] == [0, 8, 16]


def test_running_sequences_come_before_new_ones_in_one_batch() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_sequence(1, [1, 2, 3]))
    step(scheduler)
    scheduler.add(make_sequence(2, range(1, 11)))
    assert shares(step(scheduler)) == [(1, 1), (2, 7)]
    assert shares(step(scheduler)) == [(1, 1), (2, 3)]
    assert shares(step(scheduler)) == [(1, 1), (2, 1)]


def test_who_has_caught_up_is_steady_and_stays_the_same_tuple() -> None:
    scheduler = make_scheduler()
    first, second = make_sequence(1, [1, 2]), make_sequence(2, [3])
    scheduler.add(first)
    assert step(scheduler).steady == ()
    assert step(scheduler).steady == (first,)
    scheduler.add(second)
    assert step(scheduler).steady == (first,)
    joined = step(scheduler)
    assert joined.steady == (first, second)
    assert step(scheduler).steady is joined.steady


def test_a_steady_sequence_asks_for_a_block_at_block_edges_alone() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_sequence(1, [1, 2, 3], max_tokens=12))
    step(scheduler)
    changed = [step(scheduler).changed for _ in range(9)]
    # The fourth token goes to the first block, the fifth, ninth, ... to the next one.
    assert [len(each) for each in changed] == [0, 1, 0, 0, 0, 1, 0, 0, 0]


def test_one_that_was_preempted_asks_at_its_own_block_edges_alone() -> None:
    scheduler = make_scheduler(
        block_size=4, max_num_seqs=1, prefix_cache=False, policy=PriorityPolicy(ageing_s=1e9)
    )
    low = make_sequence(1, [1, 2, 3], max_tokens=30, priority=1)
    scheduler.add(low)
    step(scheduler)
    step(scheduler)
    scheduler.add(make_sequence(2, [1], max_tokens=3))
    while not (low.num_preemptions and low.status is Status.RUNNING):
        step(scheduler)
    while low.num_tokens < low.max_num_tokens:
        feeds_into_new_block = low.num_computed_tokens % 4 == 0
        assert len(step(scheduler).changed) == feeds_into_new_block


def test_max_num_seqs_bounds_who_runs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for sequence_id in (1, 2, 3):
        scheduler.add(make_sequence(sequence_id, [1]))
    assert shares(step(scheduler)) == [(1, 1), (2, 1)]
    assert [each.sequence_id for each in scheduler.waiting] == [3]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_max_num_partial_prefills_bounds_who_is_fed_in_chunks(most: int) -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=16,
        long_prefill_token_threshold=4,
        max_num_partial_prefills=most,
    )
    for sequence_id in range(1, 5):
        scheduler.add(make_sequence(sequence_id, [sequence_id] * 9))
    assert shares(step(scheduler)) == [(each, 4) for each in range(1, most + 1)]


def test_a_short_prompt_passes_where_another_chunked_one_may_not_start() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=4)
    for sequence_id, length in ((1, 9), (2, 9), (3, 4)):
        scheduler.add(make_sequence(sequence_id, [sequence_id] * length))
    assert shares(step(scheduler)) == [(1, 4), (3, 4)]


def test_long_prefill_token_threshold_leaves_budget_to_others() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    scheduler.add(make_sequence(1, [1] * 20))
    scheduler.add(make_sequence(2, [2] * 5))
    assert shares(step(scheduler)) == [(1, 6), (2, 5)]
    assert shares(step(scheduler)) == [(2, 1), (1, 6)]


@pytest.mark.parametrize("threshold", [None, 3])
@pytest.mark.parametrize("partial", [1, 3])
def test_a_decode_step_is_never_delayed_by_more_than_a_chunk(
    threshold: int | None, partial: int
) -> None:
    budget = 10
    scheduler = make_scheduler(
        num_blocks=400,
        max_num_batched_tokens=budget,
        max_num_seqs=6,
        max_num_partial_prefills=partial,
        long_prefill_token_threshold=threshold,
    )
    for sequence_id in range(4):
        scheduler.add(make_sequence(sequence_id, [sequence_id] * 2, max_tokens=80))
    for sequence_id in range(4, 16):
        scheduler.add(make_sequence(sequence_id, [sequence_id] * 50, max_tokens=3))
    caught_up: set[int] = set()
    while scheduler.has_work:
        output = step(scheduler)
        assert output.num_scheduled_tokens <= budget
        assert {each for each, _ in shares(output)} >= caught_up
        caught_up = {each.sequence_id for each in scheduler.running.steady.members}


def test_admission_reserves_the_whole_prompt_and_the_watermark() -> None:
    scheduler = make_scheduler(num_blocks=10, watermark=0.2, max_num_batched_tokens=64)
    scheduler.add(make_sequence(1, [1] * 16, max_tokens=20))  # 4 of 10 blocks
    scheduler.add(make_sequence(2, [2] * 20))  # 5, which leaves 1: less than the watermark's 2
    assert shares(step(scheduler)) == [(1, 16)]
    scheduler.abort(1)
    assert shares(step(scheduler)) == [(2, 20)]


def test_admission_leaves_no_more_than_can_be_used() -> None:
    scheduler = make_scheduler(num_blocks=10, watermark=0.2, max_num_batched_tokens=64)
    scheduler.add(make_sequence(1, [1] * 15, max_tokens=1))  # it ends in its last block
    scheduler.add(make_sequence(2, [2] * 19, max_tokens=1))
    assert shares(step(scheduler)) == [(1, 15), (2, 19)]


def test_a_sequence_alone_may_fill_the_pool() -> None:
    scheduler = make_scheduler(num_blocks=4, watermark=0.5)
    scheduler.add(make_sequence(1, [1] * 16))
    assert shares(step(scheduler)) == [(1, 16)]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=4, prefix_cache=False)
    old, young, queued = (make_sequence(sequence_id, [1] * 7) for sequence_id in (1, 2, 3))
    for sequence in (old, young, queued):
        scheduler.add(sequence)
    step(scheduler)  # two blocks each: the pool is full
    step(scheduler)
    output = step(scheduler)  # the ninth token of the old one needs a block
    assert shares(output) == [(1, 1)]
    assert output.removed == (2,)
    assert young.status is Status.WAITING
    assert young.num_computed_tokens == 0
    assert young.num_output_tokens == 2
    assert young.num_preemptions == 1
    assert scheduler.waiting.first(3) == [young, queued]
    assert scheduler.running.num_preemptions == 1


@pytest.mark.parametrize(("num_preemptions", "spare"), [(0, 0), (1, 4), (2, 16)])
@pytest.mark.parametrize("missing", [0, 1])
def test_one_comes_back_to_four_times_the_room_each_time(
    num_preemptions: int, spare: int, missing: int
) -> None:
    scheduler = make_scheduler(num_blocks=64, block_size=4)
    scheduler.add(make_sequence(1, [1], max_tokens=200))
    step(scheduler)
    sequence = make_sequence(2, [2] * 8, max_tokens=200)
    sequence.num_preemptions = num_preemptions
    scheduler.add(sequence)
    pool = scheduler.cache.pool
    pool.allocate(pool.num_free - 2 - spare + missing)
    output = scheduler.schedule()
    assert output.added == (() if missing else (sequence,))


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    scheduler = make_scheduler(num_blocks=4, prefix_cache=False)
    scheduler.add(make_sequence(1, [1] * 7))
    scheduler.add(make_sequence(2, [2] * 7))
    step(scheduler)
    step(scheduler)
    scheduler.add(make_sequence(3, [3], max_tokens=1))
    assert shares(step(scheduler)) == [(1, 1)]  # 3 would have room in the blocks of 2
    assert (3, 1) in shares(step(scheduler))


def test_finish_reasons() -> None:
    scheduler = make_scheduler(max_model_len=6)
    by_length = make_sequence(1, [1, 2], max_tokens=2)
    by_eos = make_sequence(2, [1, 2])
    by_limit = make_sequence(3, [1, 2, 3], max_tokens=100, ignore_eos=True)
    for sequence in (by_length, by_eos, by_limit):
        scheduler.add(sequence)
    step(scheduler)
    step(scheduler, token=EOS)
    step(scheduler, token=EOS)
    assert by_length.finish_reason is FinishReason.STOP  # EOS beats the length it also reached
    assert by_eos.finish_reason is FinishReason.STOP
    assert by_limit.finish_reason is FinishReason.LENGTH
    assert by_limit.token_ids.tolist() == [1, 2, 3, 5, EOS, EOS]
    assert not scheduler.has_work


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_an_end_of_sequence_token_counts_only_after_min_tokens(min_tokens: int) -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, [1], min_tokens=min_tokens)
    scheduler.add(sequence)
    while scheduler.has_work:
        step(scheduler, token=EOS)
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.num_output_tokens == min_tokens + 1


def test_a_result_for_other_sequences_is_a_worker_error() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, [1]))
    output = scheduler.schedule()
    result = StepResult(step_id=output.step_id, sequence_ids=[2], token_ids=[5])
    with pytest.raises(WorkerError, match=r"tokens for sequences \[2\], wanted for \[1\]"):
        scheduler.update(result)


@pytest.mark.parametrize("token_ids", [[], [5, 5]])
def test_a_result_with_too_few_or_many_tokens_is_a_worker_error(token_ids: list[int]) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, [1]))
    output = scheduler.schedule()
    result = StepResult(step_id=output.step_id, sequence_ids=[1], token_ids=token_ids)
    with pytest.raises(WorkerError, match=f"{len(token_ids)} tokens"):
        scheduler.update(result)


def test_a_result_of_another_step_is_a_worker_error() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, [1]))
    output = scheduler.schedule()
    result = StepResult(step_id=output.step_id + 1, sequence_ids=[1], token_ids=[5])
    with pytest.raises(WorkerError, match="result of step 2 for step 1"):
        scheduler.update(result)


def test_restart_keeps_order_and_tokens() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(sequence_id, [1, 2]) for sequence_id in (1, 2, 3)]
    for sequence in sequences:
        scheduler.add(sequence)
    step(scheduler)
    scheduler.schedule()
    scheduler.restart()
    scheduler.check_invariants()
    assert scheduler.waiting.first(4) == sequences
    assert not any(each.num_preemptions for each in sequences)
    assert shares(step(scheduler)) == [(1, 3), (2, 3), (3, 3)]


def test_a_sequence_that_is_known_or_too_long_is_a_bug() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(make_sequence(1, [1]))
    with pytest.raises(AssertionError, match="known already"):
        scheduler.add(make_sequence(1, [2]))
    with pytest.raises(AssertionError, match="too long"):
        scheduler.add(make_sequence(2, [1] * 17))
    drain(scheduler)


def test_steps_count_from_one_again_after_a_restart() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, [1], max_tokens=9, ignore_eos=True))
    assert [step(scheduler).step_id for _ in range(3)] == [1, 2, 3]
    scheduler.restart()
    assert [step(scheduler).step_id for _ in range(3)] == [1, 2, 3]
