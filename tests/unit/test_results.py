"""Results of steps: whose they must be, scores of prompts, and rows that couldn't be sampled."""

from dataclasses import replace
from typing import Any

import pytest

from runtime.errors import InvalidRequestError, LockstepError, ModelOutputError, WorkerError
from runtime.request import FinishReason, TokenLogprobs
from runtime.scheduling.output import ScheduledSequence, SchedulerOutput
from runtime.scheduling.results import take_scores
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import Fault, StepResult
from tests.scheduling import make_scheduler, make_sequence
from tests.steps import finish, ids, num_used, step

pytestmark = pytest.mark.unit


def result_of(output: SchedulerOutput, **changes: Any) -> StepResult:
    """Token 5 for each row, and a score that is its place for each scored token."""
    sampled = ids([*output.steady, *(each.sequence for each in output.scheduled if each.samples)])
    num_scored = sum(len(each.scored) for each in output.scheduled)
    result = StepResult(
        step_id=output.step_id,
        sequence_ids=sampled,
        token_ids=[5] * len(sampled),
        scores=[TokenLogprobs(float(-place), (), ()) for place in range(num_scored)],
    )
    return replace(result, **changes)


def started(*sequences: Sequence, **options: Any) -> tuple[Scheduler, SchedulerOutput]:
    scheduler = make_scheduler(**options)
    for sequence in sequences:
        scheduler.add(sequence)
    output = scheduler.schedule()
    assert output is not None
    return scheduler, output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_id": 7}, "result of step 7 for step 1"),
        ({"sequence_ids": [2, 1]}, r"step 1: 2 tokens for sequences \[2, 1\], wanted for \[1, 2\]"),
        ({"sequence_ids": [1]}, r"2 tokens for sequences \[1\], wanted for \[1, 2\]"),
        ({"token_ids": [5]}, r"1 tokens for sequences \[1, 2\]"),
        ({"scores": []}, "step 1: 0 scores of prompt tokens, wanted 2"),
        ({"scores": [TokenLogprobs(0.0, (), ())] * 3}, "3 scores of prompt tokens, wanted 2"),
    ],
)
def test_a_result_that_is_not_the_steps_ends_the_ranks(
    changes: dict[str, Any], message: str
) -> None:
    scored = make_sequence(1, [1, 2, 3], params={"prompt_logprobs": 0})
    scheduler, output = started(scored, make_sequence(2, [4]))
    with pytest.raises(WorkerError, match=message):
        scheduler.update(result_of(output, **changes))


def test_scores_go_to_their_prompts_chunk_by_chunk() -> None:
    plain = make_sequence(1, [2] * 3)
    first = make_sequence(2, [1] * 8, params={"prompt_logprobs": 0})
    second = make_sequence(3, [3] * 4, params={"prompt_logprobs": 2})
    scheduler, output = started(plain, first, second, max_num_batched_tokens=8)
    told: dict[int, int] = {}
    while not second.num_output_tokens:
        outcome = scheduler.update(result_of(output))
        places = [-each.logprob for some in outcome.scores.values() for each in some]
        assert places == [*range(len(places))], "in the order of the plan"
        told |= {i: told.get(i, 0) + len(some) for i, some in outcome.scores.items()}
        output = scheduler.schedule()
    # The last token of a prompt is fed, and has no successor in the prompt.
    assert told == {2: 7, 3: 3}
    assert [each.num_scored_tokens for each in (plain, first, second)] == [0, 7, 3]
    assert scheduler.update(result_of(output)).scores == {}


def test_scores_of_two_prompts_in_one_step() -> None:
    scored = [make_sequence(i, [i] * 4, params={"prompt_logprobs": 0}) for i in (1, 2)]
    plain = make_sequence(3, [3] * 4)
    output = SchedulerOutput(
        step_id=1,
        steady=(),
        scheduled=(
            ScheduledSequence.of(scored[0], 2),
            ScheduledSequence.of(plain, 4),
            ScheduledSequence.of(scored[1], 4),
        ),
        removed=(),
        added=(),
        changed=(),
        copies=(),
    )
    taken = take_scores(output, result_of(output))
    assert {i: [each.logprob for each in some] for i, some in taken.items()} == {
        1: [0.0, -1.0],
        2: [-2.0, -3.0, -4.0],
    }


@pytest.mark.parametrize("num_fed", [3, 6])  # a chunk, and all, with the first token
def test_a_score_that_is_no_number_ends_its_sequence(num_fed: int) -> None:
    scored = make_sequence(1, [1] * 6, params={"prompt_logprobs": 0})
    mate = make_sequence(2, [2])
    scheduler, output = started(mate, scored, max_num_batched_tokens=num_fed + 1)
    scores = [TokenLogprobs(-1.0, (), ()) for _ in result_of(output).scores]
    scores[-1] = TokenLogprobs(float("nan"), (), ())
    outcome = scheduler.update(result_of(output, scores=scores))
    scheduler.check_invariants()
    ((sequence, error),) = outcome.failed
    assert sequence is scored
    assert isinstance(error, ModelOutputError)
    assert outcome.scores == {}
    assert outcome.sequences == [mate]
    assert scored.num_output_tokens == 0


def test_logprobs_go_to_the_sequences_of_their_rows() -> None:
    scheduler, output = started(make_sequence(7, [1]), make_sequence(9, [2]))
    logprobs = {1: TokenLogprobs(-0.5, (3,), (-0.25,))}
    outcome = scheduler.update(result_of(output, logprobs=logprobs))
    assert outcome.logprobs == {9: logprobs[1]}


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (Fault.INVALID_LOGITS, ModelOutputError, "the model's logits for this request are NaN"),
        (Fault.EMPTY_SUPPORT, InvalidRequestError, "no token is left to sample: allowed_token_ids"),
    ],
)
@pytest.mark.parametrize("steps", [0, 2])  # with its first token, and when it is steady
def test_a_fault_ends_its_sequence_alone(
    fault: Fault, kind: type[LockstepError], message: str, steps: int
) -> None:
    faulty, mate = make_sequence(1, [1, 2, 3]), make_sequence(2, [4, 5])
    scheduler = make_scheduler()
    scheduler.add(faulty)
    scheduler.add(mate)
    for _ in range(steps):
        step(scheduler)
    output = scheduler.schedule()
    outcome = scheduler.update(result_of(output, faults={0: fault}))
    scheduler.check_invariants()
    ((sequence, error),) = outcome.failed
    assert sequence is faulty
    assert type(error) is kind
    assert message in str(error)
    assert faulty.finish_reason is FinishReason.ABORT
    assert faulty.num_output_tokens == steps, "what was drawn from nothing is no token"
    assert (outcome.sequences, outcome.token_ids, outcome.finished) == ([mate], [5], [])
    assert mate.num_output_tokens == steps + 1
    scheduler.abort(1)  # known to have ended
    finish(scheduler, scheduler.schedule())
    assert mate.num_output_tokens == steps + 2
    assert num_used(scheduler) == -(-mate.num_computed_tokens // 4)


def test_a_fault_in_the_last_token_is_no_end_by_length() -> None:
    faulty, mate = make_sequence(1, [1], max_tokens=2), make_sequence(2, [2], max_tokens=2)
    scheduler = make_scheduler()
    scheduler.add(faulty)
    scheduler.add(mate)
    step(scheduler)
    outcome = scheduler.update(
        result_of(scheduler.schedule(), faults={0: Fault.INVALID_LOGITS}, token_ids=[0, 0])
    )
    assert outcome.finished == [mate]
    assert [sequence for sequence, _ in outcome.failed] == [faulty]
    assert not scheduler.has_work
    scheduler.check_invariants()


def test_who_was_aborted_during_the_step_does_not_fail_too() -> None:
    scheduler, output = started(make_sequence(1, [1]), make_sequence(2, [2]))
    scheduler.abort(1)
    faults = dict.fromkeys((0, 1), Fault.EMPTY_SUPPORT)
    outcome = scheduler.update(result_of(output, faults=faults))
    assert [sequence.sequence_id for sequence, _ in outcome.failed] == [2]
    assert not scheduler.has_work
    scheduler.check_invariants()


def test_forks_of_a_faulty_source_are_waited_for_no_more() -> None:
    source = make_sequence(1, [1, 2, 3, 4, 5])
    fork = source.fork(2, seed=9)
    scheduler, output = started(source)
    scheduler.update(result_of(output, faults={0: Fault.INVALID_LOGITS}))
    scheduler.check_invariants()
    step(scheduler)
    assert (fork.num_output_tokens, source.num_output_tokens) == (1, 0)
