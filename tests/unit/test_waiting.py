import pytest

from runtime.errors import CapacityError, DeadlineError
from runtime.request import FinishReason
from runtime.scheduling.admission import LOOKAHEAD
from runtime.scheduling.limits import QueueLimits
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence, Status
from runtime.scheduling.waiting import MAX_RETRY_S, MIN_RETRY_S
from tests.scheduling import make_scheduler, make_sequence
from tests.steps import drain, finish, ids, shares, step

pytestmark = pytest.mark.unit


def make_queue(*, max_num_seqs: int = 1, **limits: float | None) -> Scheduler:
    return make_scheduler(max_num_seqs=max_num_seqs, queue=QueueLimits(**limits))


def make_busy(scheduler: Scheduler, *, max_tokens: int = 100) -> Sequence:
    """Lets one sequence run."""
    sequence = make_sequence(0, [1], max_tokens=max_tokens)
    scheduler.add(sequence)
    step(scheduler)
    return sequence


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    scheduler = make_queue(max_queued_requests=2)
    make_busy(scheduler)
    for sequence_id in (1, 2):
        scheduler.add(make_sequence(sequence_id, [1]))
    refused = make_sequence(3, [1])
    refused.fork(4, seed=1)
    with pytest.raises(CapacityError, match="2 requests wait: max_queued_requests=2") as caught:
        scheduler.add(refused)
    assert MIN_RETRY_S <= caught.value.retry_after_s <= MAX_RETRY_S
    scheduler.check_invariants()
    assert scheduler.num_refused == 1
    assert ids(scheduler.waiting) == [1, 2]
    scheduler.abort(1)
    scheduler.add(refused)  # its id is still new
    assert ids(scheduler.waiting) == [2, 3]


def test_a_queue_full_of_tokens_refuses() -> None:
    scheduler = make_queue(max_queued_tokens=10)
    make_busy(scheduler)
    scheduler.add(make_sequence(1, [1] * 6))
    with pytest.raises(CapacityError, match=r"of 5 tokens, 11 tokens .* max_queued_tokens=10"):
        scheduler.add(make_sequence(2, [1] * 5))
    scheduler.check_invariants()
    scheduler.add(make_sequence(3, [1] * 4))
    assert ids(scheduler.waiting) == [1, 3]


def test_a_prompt_longer_than_all_that_may_wait_is_taken_alone() -> None:
    scheduler = make_queue(max_queued_tokens=10)
    make_busy(scheduler)
    scheduler.add(make_sequence(1, [1] * 11))
    with pytest.raises(CapacityError):
        scheduler.add(make_sequence(2, [1]))


def test_requests_that_free_slots_are_there_for_do_not_count() -> None:
    scheduler = make_queue(max_num_seqs=3, max_queued_requests=0, max_queued_tokens=1)
    make_busy(scheduler)
    for sequence_id in (1, 2):
        scheduler.add(make_sequence(sequence_id, [1] * 5))
    with pytest.raises(CapacityError):
        scheduler.add(make_sequence(3, [1]))
    assert ids(step(scheduler).added) == [1, 2]


def test_preempted_ones_do_not_count_and_are_never_refused() -> None:
    scheduler = make_queue(max_num_seqs=2, max_queued_requests=2)
    for sequence_id in (1, 2):
        scheduler.add(make_sequence(sequence_id, [1]))
    step(scheduler)
    scheduler.restart()
    assert len(scheduler.waiting) == 2
    for sequence_id in (3, 4, 5, 6):  # two for the free slots, two that wait
        scheduler.add(make_sequence(sequence_id, [1]))
    with pytest.raises(CapacityError):
        scheduler.add(make_sequence(7, [1]))


def test_the_hint_follows_how_long_others_waited() -> None:
    hints = []
    for wait_s in (0.0, 5.0, 1e6):
        scheduler = make_queue(max_queued_requests=0)
        scheduler.add(make_sequence(1, [1], max_tokens=2), now=0.0)
        step(scheduler, now=wait_s)
        with pytest.raises(CapacityError) as caught:
            scheduler.add(make_sequence(2, [1]), now=wait_s)
        hints.append(caught.value.retry_after_s)
    assert hints[0] == MIN_RETRY_S < hints[1] < hints[2] == MAX_RETRY_S


def test_who_waits_longer_than_the_queue_timeout_is_dropped() -> None:
    scheduler = make_queue(queue_timeout_s=5.0)
    make_busy(scheduler)
    late = make_sequence(1, [1])
    scheduler.add(late, now=0.0)
    scheduler.add(make_sequence(2, [1]), now=1.0)
    step(scheduler, now=4.9)
    assert scheduler.take_dropped() == []
    step(scheduler, now=5.0)
    ((sequence, error),) = scheduler.take_dropped()
    assert sequence is late
    assert isinstance(error, CapacityError)
    assert "queue_timeout_s=5" in str(error)
    assert late.finish_reason is FinishReason.ABORT
    assert scheduler.take_dropped() == []
    assert ids(scheduler.waiting) == [2]


def test_the_queue_timeout_is_for_newcomers_alone() -> None:
    scheduler = make_queue(queue_timeout_s=5.0)
    preempted = make_busy(scheduler)
    scheduler.restart()
    step(scheduler, now=100.0)
    assert preempted.status is Status.RUNNING


@pytest.mark.parametrize("now", [3.0, 10.0])
def test_who_waits_past_the_deadline_is_dropped(now: float) -> None:
    scheduler = make_queue()
    make_busy(scheduler)
    scheduler.add(make_sequence(1, [1], deadline_s=3.0))
    scheduler.add(make_sequence(2, [1], deadline_s=11.0))
    assert shares(step(scheduler, now=now)) == [(0, 1)]
    ((sequence, error),) = scheduler.take_dropped()
    assert sequence.sequence_id == 1
    assert isinstance(error, DeadlineError)
    assert ids(scheduler.waiting) == [2]


def test_a_deadline_holds_for_a_preempted_one_too() -> None:
    scheduler = make_queue(max_num_seqs=2)
    sequence = make_sequence(1, [1], deadline_s=3.0)
    scheduler.add(sequence)
    step(scheduler, now=1.0)
    step(scheduler, now=4.0)  # while it runs, its client ends it
    assert sequence.status is Status.RUNNING
    scheduler.restart()
    assert scheduler.schedule(now=5.0) is None
    assert ids(each for each, _ in scheduler.take_dropped()) == [1]


def test_a_hopeless_one_is_dropped_before_it_costs_a_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, num_blocks=64)
    for number in range(3):  # a step takes two seconds
        scheduler.add(make_sequence(number, [1], max_tokens=1), now=10.0 * number)
        output = scheduler.schedule(now=10.0 * number)
        finish(scheduler, output, now=10.0 * number + 2)
    scheduler.add(make_sequence(9, [1], max_tokens=40, ignore_eos=True), now=98.0)
    finish(scheduler, scheduler.schedule(now=98.0), now=100.0)
    hopeless = make_sequence(10, [1] * 30, deadline_s=107.0)  # needs four steps
    in_time = make_sequence(11, [1] * 30, deadline_s=109.0)
    scheduler.add(hopeless, now=100.0)
    scheduler.add(in_time, now=100.0)
    assert ids(step(scheduler, now=100.0).added) == [11]
    ((sequence, error),) = scheduler.take_dropped()
    assert sequence is hopeless
    assert isinstance(error, DeadlineError)
    drain(scheduler)


def test_a_cached_prompt_is_not_hopeless() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, num_blocks=64)
    prompt = range(1, 31)
    scheduler.add(make_sequence(0, prompt, max_tokens=1))
    for number in range(4):
        output = scheduler.schedule(now=2.0 * number)
        finish(scheduler, output, now=2.0 * number + 2)
    scheduler.add(make_sequence(1, prompt, deadline_s=103.0), now=100.0)
    assert shares(step(scheduler, now=100.0)) == [(1, 2)]


def test_a_deadline_is_taken_as_possible_while_nothing_is_known() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_sequence(1, [1] * 30, deadline_s=0.001))
    assert ids(step(scheduler).added) == [1]


@pytest.mark.parametrize("limits", [{"queue_timeout_s": 5.0}, {}])
def test_forks_are_dropped_with_their_source(limits: dict[str, float]) -> None:
    scheduler = make_queue(**limits)
    make_busy(scheduler)
    source = make_sequence(1, [1, 2], deadline_s=None if limits else 5.0)
    forks = [source.fork(each, seed=each) for each in (2, 3)]
    scheduler.add(source)
    scheduler.abort(3)
    step(scheduler, now=5.0)
    assert [sequence for sequence, _ in scheduler.take_dropped()] == [source]
    assert all(each.status is Status.FINISHED for each in (source, *forks))
    scheduler.check_invariants()
    scheduler.abort(0)
    assert not scheduler.has_work


def test_a_fork_has_its_own_deadline_once_it_waits() -> None:
    scheduler = make_queue()
    source = make_sequence(1, [1, 2], deadline_s=5.0, max_tokens=20)
    fork = source.fork(2, seed=1)
    scheduler.add(source)
    step(scheduler, now=1.0)
    step(scheduler, now=6.0)
    assert [sequence for sequence, _ in scheduler.take_dropped()] == [fork]
    assert source.status is Status.RUNNING


def test_what_has_left_is_forgotten_by_the_clock_too() -> None:
    scheduler = make_queue(queue_timeout_s=1e6)
    make_busy(scheduler)
    for sequence_id in range(1, 2000):
        scheduler.add(make_sequence(sequence_id, [1], deadline_s=1e6))
        scheduler.abort(sequence_id)
        step(scheduler)
        if not scheduler.has_work:
            scheduler.add(make_sequence(10_000 + sequence_id, [1], max_tokens=1000))
    assert len(scheduler.waiting._times) < 100


def test_a_step_looks_at_a_few_heads_of_the_queue_however_long() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    make_busy(scheduler, max_tokens=9)
    for sequence_id in range(1, 5000):
        scheduler.add(make_sequence(sequence_id, [1] * 13))
    looked_at: list[Sequence] = []
    find_prefix = scheduler.cache.find_prefix
    scheduler.cache.find_prefix = lambda each: looked_at.append(each) or find_prefix(each)
    assert shares(step(scheduler)) == [(0, 1)]
    assert ids(looked_at) == list(range(1, 1 + LOOKAHEAD))


def test_an_idle_scheduler_takes_what_an_old_slow_step_would_make_late() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, [1], max_tokens=1), now=0.0)
    finish(scheduler, scheduler.schedule(now=0.0), now=50.0)  # as the first step of a device is
    patient = make_sequence(2, [1], deadline_s=104.0, max_tokens=1)
    scheduler.add(patient, now=100.0)
    assert ids(step(scheduler, now=100.0).added) == [2]


def test_free_slots_are_no_room_where_blocks_are_missing() -> None:
    scheduler = make_queue(max_num_seqs=8, max_queued_requests=1)
    blocks = scheduler.cache.pool.num_blocks
    size = scheduler.cache.layout.block_size
    scheduler.add(make_sequence(1, [1] * (blocks * size - 4), max_tokens=4, ignore_eos=True))
    while scheduler.running.behind or not scheduler.running.sequences:
        step(scheduler)
    scheduler.add(make_sequence(2, [2] * 40))
    step(scheduler)
    assert len(scheduler.waiting) == 1
    with pytest.raises(CapacityError, match="1 requests wait: max_queued_requests=1"):
        scheduler.add(make_sequence(3, [3]))
