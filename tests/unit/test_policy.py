from collections.abc import Iterable

import pytest

from runtime.scheduling.policy import FcfsPolicy, Policy, PriorityPolicy
from runtime.scheduling.sequence import Sequence
from tests.scheduling import make_scheduler, make_sequence
from tests.steps import drain, finish, ids, shares, step

pytestmark = pytest.mark.unit

NEVER = 1e9


def order(policy: Policy, waiting: Iterable[Sequence]) -> list[int]:
    for sequence in waiting:
        policy.push(sequence)
    return ids(policy.order())


def arrived(sequence: Sequence, at_s: float) -> Sequence:
    sequence.arrival_s = at_s
    return sequence


def test_fcfs_serves_in_order_of_arrival() -> None:
    policy = FcfsPolicy()
    sequences = [make_sequence(each, [1], priority=-each) for each in (3, 1, 2)]
    assert order(policy, sequences) == [3, 1, 2]
    policy.remove(sequences[1])
    policy.push_front(sequences[1])
    assert ids(policy.order()) == [1, 3, 2]
    assert len(policy) == 3


def test_priority_serves_classes_in_order_and_each_by_arrival() -> None:
    classes = [(1, 0), (2, -1), (3, 5), (4, -1), (5, 0)]
    sequences = [make_sequence(each, [1], priority=priority) for each, priority in classes]
    assert order(PriorityPolicy(ageing_s=NEVER), sequences) == [2, 4, 1, 5, 3]


def test_a_sequence_gains_a_class_for_each_ageing_time() -> None:
    old = arrived(make_sequence(1, [1], priority=2), at_s=0.0)
    before = arrived(make_sequence(2, [1]), at_s=19.0)
    after = arrived(make_sequence(3, [1]), at_s=21.0)
    assert order(PriorityPolicy(ageing_s=10.0), [old, before, after]) == [2, 1, 3]


def test_strictly_lower_classes_yield_and_those_that_outwaited_do_not() -> None:
    policy = PriorityPolicy(ageing_s=10.0)
    urgent = arrived(make_sequence(1, [1]), at_s=100.0)
    equal = arrived(make_sequence(2, [1]), at_s=200.0)
    lower = arrived(make_sequence(3, [1], priority=1), at_s=91.0)
    aged = arrived(make_sequence(4, [1], priority=1), at_s=89.0)
    assert [policy.yields(each, urgent) for each in (equal, lower, aged)] == [False, True, False]
    assert not policy.yields(urgent, lower)


def test_an_urgent_request_takes_the_place_of_a_lower_class() -> None:
    scheduler = make_scheduler(max_num_seqs=2, policy=PriorityPolicy(ageing_s=NEVER))
    low = [make_sequence(each, [each], priority=1) for each in (1, 2)]
    for sequence in low:
        scheduler.add(sequence)
    step(scheduler)
    scheduler.add(make_sequence(3, [3]), now=1.0)
    output = step(scheduler, now=1.0)
    assert output.removed == (2,)
    assert shares(output) == [(1, 1), (3, 1)]
    assert low[1].num_preemptions == 1
    assert scheduler.running.num_preemptions == 1


@pytest.mark.parametrize("priority", [0, 1])
def test_nobody_takes_the_place_of_an_equal_or_more_urgent_class(priority: int) -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy=PriorityPolicy(ageing_s=NEVER))
    scheduler.add(make_sequence(1, [1]))
    step(scheduler)
    scheduler.add(make_sequence(2, [2], priority=priority), now=1.0)
    assert shares(step(scheduler, now=1.0)) == [(1, 1)]


def test_nobody_takes_the_place_of_one_that_has_outwaited_its_class() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy=PriorityPolicy(ageing_s=10.0))
    scheduler.add(make_sequence(1, [1], priority=1), now=0.0)
    step(scheduler)
    scheduler.add(make_sequence(2, [2]), now=11.0)
    assert shares(step(scheduler, now=11.0)) == [(1, 1)]


def test_only_as_many_are_preempted_as_the_urgent_one_needs() -> None:
    scheduler = make_scheduler(
        num_blocks=11, block_size=4, policy=PriorityPolicy(ageing_s=NEVER), prefix_cache=False
    )
    for sequence_id in (1, 2, 3):
        scheduler.add(make_sequence(sequence_id, [sequence_id] * 13, max_tokens=3, priority=1))
    assert ids(step(scheduler).added) == [1, 2]
    scheduler.add(make_sequence(4, [4] * 20, max_tokens=1), now=1.0)
    output = step(scheduler, now=1.0)
    assert output.removed == (2,)
    assert shares(output) == [(1, 1), (4, 20)]
    # It comes back before the third of its class.
    assert ids(scheduler.waiting.first(2)) == [2, 3]


def test_nobody_is_preempted_where_that_would_not_make_room() -> None:
    scheduler = make_scheduler(
        num_blocks=12, block_size=4, policy=PriorityPolicy(ageing_s=NEVER), prefix_cache=False
    )
    scheduler.add(make_sequence(1, [1] * 29, max_tokens=4, priority=0))
    step(scheduler)
    scheduler.add(make_sequence(2, [2] * 6, max_tokens=4, priority=1))
    step(scheduler)
    scheduler.add(make_sequence(3, [3] * 20, max_tokens=1), now=1.0)
    assert step(scheduler, now=1.0).removed == ()


def test_blocks_that_others_share_are_no_room() -> None:
    scheduler = make_scheduler(
        num_blocks=8, block_size=4, policy=PriorityPolicy(ageing_s=NEVER), max_num_seqs=4
    )
    prefix = [9] * 16
    scheduler.add(make_sequence(1, prefix, max_tokens=9))
    step(scheduler)
    scheduler.add(make_sequence(2, [*prefix, 2], max_tokens=3, priority=1))
    step(scheduler)
    # All but the fifth block of 2 are those of 1, which doesn't yield: 3 can't run whoever goes.
    scheduler.add(make_sequence(3, [3] * 20, max_tokens=1), now=1.0)
    output = step(scheduler, now=1.0)
    assert output.removed == ()
    drain(scheduler)


def test_a_victim_is_not_taken_from_for_a_head_that_may_not_start() -> None:
    scheduler = make_scheduler(
        num_blocks=32,
        block_size=4,
        max_num_batched_tokens=8,
        policy=PriorityPolicy(ageing_s=NEVER),
        max_num_partial_prefills=1,
    )
    low = make_sequence(1, [1] * 7, max_tokens=60, priority=1)
    scheduler.add(low)
    step(scheduler)
    scheduler.add(make_sequence(2, [2] * 60, max_tokens=1))
    step(scheduler)
    # The head needs chunks of its own, and there is one that is fed in chunks already.
    scheduler.add(make_sequence(3, [3] * 52, max_tokens=1), now=1.0)
    for _ in range(4):
        step(scheduler, now=1.0)
    assert low.num_preemptions == 0
    drain(scheduler)


@pytest.mark.parametrize(
    ("length", "threshold", "partial"),
    [
        (4, None, 1),  # the prompt that is fed takes all of the budget, so that even 4 are a part
        (60, None, 2),  # a second one may be fed in parts, of which there are none
        (3, 4, 1),  # and here three that decode leave one token
    ],
)
def test_nobody_makes_room_where_the_token_budget_is_taken(
    length: int, threshold: int | None, partial: int
) -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=8,
        max_num_seqs=5,
        policy=PriorityPolicy(ageing_s=NEVER),
        max_num_partial_prefills=partial,
        long_prefill_token_threshold=threshold,
    )
    low = make_sequence(0, [9], max_tokens=60, priority=1)
    scheduler.add(low)
    for sequence_id in (1, 2, 3):
        scheduler.add(make_sequence(sequence_id, [sequence_id], max_tokens=60))
    step(scheduler)
    scheduler.add(make_sequence(4, [4] * 60, max_tokens=1))
    step(scheduler)
    scheduler.add(make_sequence(5, [5] * length, max_tokens=1))
    for _ in range(3):
        assert 5 not in ids(step(scheduler).added)
    assert low.num_preemptions == 0


def test_an_urgent_prompt_takes_the_place_of_one_that_is_fed_in_chunks() -> None:
    scheduler = make_scheduler(
        max_num_batched_tokens=8, policy=PriorityPolicy(ageing_s=NEVER), num_blocks=100
    )
    fed = make_sequence(1, [1] * 60, priority=1)
    decoding = make_sequence(2, [2], priority=1, max_tokens=60)
    scheduler.add(decoding)
    step(scheduler)
    scheduler.add(fed)
    step(scheduler)
    decoding.arrival = 100  # the worse of the two, but it is in nobody's way
    scheduler.add(make_sequence(3, [3] * 60), now=1.0)
    output = step(scheduler, now=1.0)
    assert output.removed == (1,)
    assert shares(output) == [(2, 1), (3, 7)]


def test_nobody_makes_room_for_one_that_would_be_late() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy=PriorityPolicy(ageing_s=NEVER))
    low = make_sequence(1, [1], priority=1)
    scheduler.add(low)
    for now in (0.0, 2.0):  # a step takes two seconds
        output = scheduler.schedule(now=now)
        finish(scheduler, output, now=now + 2.0)
    scheduler.add(make_sequence(2, [2], deadline_s=5.0), now=4.0)
    assert shares(step(scheduler, now=4.0)) == [(1, 1)]
    assert low.num_preemptions == 0


@pytest.mark.parametrize("num_decoders", [2, 3])
def test_a_step_runs_where_an_urgent_one_takes_what_a_growing_one_has_just_got(
    num_decoders: int,
) -> None:
    scheduler = make_scheduler(
        num_blocks=3 * num_decoders - 1,
        block_size=4,
        policy=PriorityPolicy(ageing_s=NEVER),
        prefix_cache=False,
    )
    for sequence_id in range(num_decoders):
        scheduler.add(make_sequence(sequence_id, [sequence_id] * 3, max_tokens=9, priority=1))
    for _ in range(6):
        step(scheduler)  # two blocks each, the next token asks for a third one
    scheduler.add(make_sequence(50, [5] * (12 * num_decoders - 8), max_tokens=4), now=1.0)
    assert scheduler.schedule(now=1.0) is not None


def test_one_that_has_aged_is_not_the_first_to_lose_its_blocks() -> None:
    policy = PriorityPolicy(ageing_s=1.0)
    aged, young = make_sequence(1, [1], priority=5), make_sequence(2, [1], priority=0)
    aged.arrival_s, young.arrival_s = 0.0, 50.0
    assert max((aged, young), key=policy.rank) is young
    fresh = make_sequence(3, [1], priority=5)
    fresh.arrival_s = 50.0
    assert max((young, fresh), key=policy.rank) is fresh
