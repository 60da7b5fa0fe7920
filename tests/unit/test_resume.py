"""Requests that another engine has begun: what is refused, what they wait for, what they share."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from runtime.choices import make_choices
from runtime.errors import CapacityError, DeadlineError, InvalidRequestError
from runtime.request import ModelInfo, Request, ResumedChoice
from runtime.sampling_params import fork_seed
from runtime.scheduling.limits import QueueLimits
from runtime.scheduling.policy import FairPolicy, FcfsPolicy, Policy, PriorityPolicy
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.waiting import MAX_SCORED
from tests.params import complete_params
from tests.scheduling import Chunk, make_scheduler, make_sequence, oracle_continuation
from tests.steps import OracleRun, assert_right, drain, ids, step

pytestmark = pytest.mark.unit

NEVER = 1e9
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
NOTHING = ResumedChoice()
ENDED = ResumedChoice((5, 6), has_ended=True)
MODEL = ModelInfo(
    name="m",
    path="",
    architecture="A",
    vocab_size=10,
    max_model_len=100,
    eos_token_ids=(0,),
    tp_size=1,
)


def make_request(*resumed: ResumedChoice, n: int | None = None, **params: Any) -> Request:
    fields = {"max_tokens": 4, "n": len(resumed) if n is None else n} | params
    return Request(
        request_id=1,
        prompt_token_ids=PROMPT,
        params=complete_params(**fields),
        seed=7,
        resumed=resumed,
        was_accepted=bool(resumed),
    )


def choices_of(request: Request) -> dict[int, Sequence]:
    return make_choices(request, itertools.count(1), arrived_s=3.0)


def make_resumed(sequence_id: int, prompt: Iterable[int] = (1,), **options: Any) -> Sequence:
    return make_sequence(sequence_id, prompt, **{"max_tokens": 100} | options, is_resumed=True)


def make_busy(**options: Any) -> Scheduler:
    """With a slot alone, which is taken."""
    scheduler = make_scheduler(max_num_seqs=1, **options)
    scheduler.add(make_sequence(0, [1], max_tokens=100))
    step(scheduler)
    return scheduler


@pytest.mark.parametrize(
    ("resumed", "n", "message"),
    [
        ((NOTHING,), 2, "resumed has 1 entries: it must have n=2"),
        ((NOTHING, NOTHING), 1, "resumed has 2 entries: it must have n=1"),
        ((ENDED, ENDED), 2, "resumed: all choices have ended"),
        ((NOTHING, ResumedChoice((3, 10))), 2, r"resumed\[1\] token id 10 must be in \[0, 10\)"),
        ((ResumedChoice((-1,)),), 1, r"resumed\[0\] token id -1 must be in \[0, 10\)"),
        ((ResumedChoice((1, 2, 3, 4)),), 1, r"resumed\[0\] has 4 tokens .* than max_tokens=4"),
    ],
)
def test_what_no_engine_can_have_begun_is_refused(
    resumed: tuple[ResumedChoice, ...], n: int, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make_request(*resumed, n=n).check(MODEL)


def test_what_is_begun_right_is_not_refused() -> None:
    make_request(NOTHING).check(MODEL)
    make_request(ResumedChoice((1, 2, 3)), ResumedChoice((1, 2, 3, 4), has_ended=True)).check(MODEL)


def test_without_output_choices_are_forks_as_ever() -> None:
    choices = choices_of(make_request(NOTHING, NOTHING))
    assert choices[1].fork_of is choices[0]
    assert all(each.is_resumed for each in choices.values())
    assert not any(each.is_resumed for each in choices_of(make_request(n=2)).values())


def test_what_no_engine_has_accepted_is_as_new() -> None:
    request = replace(make_request(ResumedChoice((5, 6)), NOTHING), was_accepted=False)
    choices = choices_of(request)
    assert not any(each.is_resumed for each in choices.values())
    assert choices[0].num_output_tokens == 2
    scheduler = make_busy(queue=QueueLimits(max_queued_requests=1))
    for each in choices.values():  # of one request, the first counts
        scheduler.add(each, 1.0)
    with pytest.raises(CapacityError, match="2 requests wait: max_queued_requests=1"):
        scheduler.add(make_sequence(9, [1]), 1.0)


def test_with_output_each_choice_that_goes_on_is_by_itself() -> None:
    first, second, third = ResumedChoice((5, 6)), ENDED, NOTHING
    request = replace(make_request(first, second, third), timeout_s=9.0)
    choices = choices_of(request)
    assert [*choices] == [0, 2]
    assert ids(choices.values()) == [1, 2]
    assert [each.token_ids.tolist() for each in choices.values()] == [[*PROMPT, 5, 6], PROMPT]
    assert [each.num_output_tokens for each in choices.values()] == [2, 0]
    assert [each.first_choice for each in choices.values()] == [choices[0]] * 2
    assert choices[0].num_live_choices == 2
    assert [each.seed for each in choices.values()] == [7, fork_seed(7, 2)]
    for each in choices.values():
        assert each.fork_of is None
        assert each.is_resumed
        assert (each.deadline_s, each.submitted_s) == (12.0, 3.0)


@pytest.mark.parametrize(
    ("resumed", "awaiting"),
    [
        ((ResumedChoice((5,)), NOTHING), []),
        ((NOTHING, ResumedChoice((5,))), [0]),
        ((NOTHING, NOTHING), [0]),
        ((ENDED, NOTHING), []),
    ],
)
def test_scores_of_the_prompt_come_with_choice_0_if_it_has_no_output(
    resumed: tuple[ResumedChoice, ...], awaiting: list[int]
) -> None:
    choices = choices_of(make_request(*resumed, prompt_logprobs=2))
    assert [index for index, each in choices.items() if each.awaits_scores] == awaiting


def test_no_limit_of_the_queue_keeps_them_out() -> None:
    limits = QueueLimits(max_queued_requests=1, max_queued_tokens=3, queue_timeout_s=5.0)
    scheduler = make_busy(queue=limits)
    for sequence_id in range(1, 5):
        scheduler.add(make_resumed(sequence_id, PROMPT), 1.0)
    with pytest.raises(CapacityError, match="4 requests wait: max_queued_requests=1"):
        scheduler.add(make_sequence(9, [1]), 1.0)  # others wait for them
    step(scheduler, now=100.0)
    assert scheduler.take_dropped() == []
    assert ids(scheduler.waiting) == [1, 2, 3, 4]
    scheduler.check_invariants()


def test_their_deadlines_hold() -> None:
    scheduler = make_busy()
    scheduler.add(make_resumed(1, deadline_s=2.0), 1.0)
    step(scheduler, now=3.0)
    ((late, error),) = scheduler.take_dropped()
    assert late.sequence_id == 1
    assert isinstance(error, DeadlineError)


@pytest.mark.parametrize(
    "make_policy",
    [FcfsPolicy, lambda: PriorityPolicy(ageing_s=NEVER), lambda: FairPolicy(quantum=9)],
)
def test_they_wait_before_newcomers_in_their_order(make_policy: Callable[[], Policy]) -> None:
    scheduler = make_busy(policy=make_policy())
    for now, sequence in enumerate(
        (
            make_sequence(1, [1]),
            make_resumed(2),
            make_sequence(3, [1]),
            make_resumed(4),
            make_resumed(5),
        )
    ):
        scheduler.add(sequence, float(now))
    assert ids(scheduler.waiting.first(5)) == [2, 4, 5, 1, 3]
    scheduler.restart()  # the one that ran waits before them
    assert ids(scheduler.waiting.first(6)) == [0, 2, 4, 5, 1, 3]
    scheduler.abort(4)
    assert ids(scheduler.waiting.first(6)) == [0, 2, 5, 1, 3]
    scheduler.check_invariants()


def test_they_wait_before_their_own_class_alone() -> None:
    scheduler = make_busy(policy=PriorityPolicy(ageing_s=NEVER))
    for sequence in (make_sequence(1, [1], priority=-1), make_resumed(2), make_resumed(3)):
        scheduler.add(sequence)
    assert ids(scheduler.waiting.first(3)) == [1, 2, 3]


def test_a_late_one_takes_no_turn_from_those_that_wait_behind_it() -> None:
    scheduler = make_busy(policy=PriorityPolicy(ageing_s=10.0))
    scheduler.add(make_sequence(1, [1]), 0.0)
    scheduler.add(make_sequence(2, [1], priority=1), 0.0)
    scheduler.add(make_resumed(3), 50.0)
    assert ids(scheduler.waiting.first(3)) == [3, 1, 2]


def test_many_that_are_to_be_scored_keep_nobody_waiting() -> None:
    scheduler = make_busy(num_blocks=256)
    scored = {"prompt_logprobs": 0}
    for sequence_id in range(1, MAX_SCORED + 9):
        scheduler.add(make_resumed(sequence_id, [1, 2, 3], params=scored, max_tokens=2))
    scheduler.check_invariants()
    scheduler.add(make_sequence(99, [1]))
    assert 99 in ids(scheduler.waiting.first(MAX_SCORED + 2))
    drain(scheduler)


def test_cached_tokens_are_of_the_prompt_alone() -> None:
    run = OracleRun(make_scheduler())
    whole = make_sequence(1, PROMPT, max_tokens=20, ignore_eos=True)
    run.finish(whole)
    output = whole.token_ids[len(PROMPT) :].tolist()
    resumed = make_sequence(
        2, PROMPT, max_tokens=20, ignore_eos=True, is_resumed=True, output_token_ids=output[:15]
    )
    run.finish(resumed)
    assert_right([whole, resumed])
    assert resumed.num_cached_tokens == len(PROMPT)
    assert run.scheduler.admission.num_cached_tokens == len(PROMPT)
    assert sum(len(plan.input_ids) for plan in run.executor.plans[-5:]) < len(PROMPT)


@pytest.mark.parametrize("windows", [(0,), (0, 6), (0, Chunk(8))])
@pytest.mark.parametrize("num_blocks", [12, 60])
def test_from_every_point_in_one_batch(windows: tuple[int, ...], num_blocks: int) -> None:
    run = OracleRun(make_scheduler(num_blocks=num_blocks * len(windows), windows=windows))
    output = oracle_continuation(
        PROMPT, max_tokens=24, seed=5, ignore_eos=True, min_tokens=0, windows=windows
    )
    sequences = [
        make_sequence(
            cut,
            PROMPT,
            max_tokens=24,
            seed=5,
            ignore_eos=True,
            is_resumed=True,
            output_token_ids=output[:cut],
        )
        for cut in range(24)
    ]
    run.finish(*sequences)
    assert_right(sequences, windows=windows)
    assert (run.scheduler.running.num_preemptions > 0) == (num_blocks == 12)
