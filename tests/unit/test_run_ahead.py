"""Steps that are decided before the ones before them have ended."""

import pytest

from runtime.errors import WorkerError
from runtime.request import FinishReason
from runtime.scheduling.output import SchedulerOutput, StepOutcome
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence, Status
from runtime.scheduling.step_plan import StepResult
from tests.delayed import DelayedOracle
from tests.scheduling import (
    EOS,
    Chunk,
    OracleExecutor,
    make_scheduler,
    make_sequence,
    make_table,
    oracle_continuation,
)
from tests.steps import finish, ids, num_used, shares

pytestmark = pytest.mark.unit


def ahead(scheduler: Scheduler, count: int) -> list[SchedulerOutput]:
    """Decides so many steps without knowing what they bring."""
    outputs = [scheduler.schedule() for _ in range(count)]
    assert None not in outputs, "nothing runs"
    scheduler.check_invariants()
    return outputs


def bring(scheduler: Scheduler, output: SchedulerOutput, tokens: dict[int, int]) -> StepOutcome:
    """The oldest step has sampled these, by sequence id, and 5 for everybody else."""
    sampled = ids([*output.steady, *(each.sequence for each in output.scheduled if each.samples)])
    result = StepResult(
        step_id=output.step_id,
        sequence_ids=sampled,
        token_ids=[tokens.get(each, 5) for each in sampled],
    )
    outcome = scheduler.update(result)
    scheduler.check_invariants()
    return outcome


def output_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :].tolist()


def test_a_step_refers_to_what_the_step_before_samples() -> None:
    scheduler = make_scheduler()
    table = make_table(max_num_seqs=8, num_groups=1)
    for sequence_id in (1, 2):
        scheduler.add(make_sequence(sequence_id, [sequence_id] * 3))
    first = table.flatten(scheduler.schedule())
    assert len(first.token_references.rows) == 0
    scheduler.add(make_sequence(3, [3, 3]))
    second = table.flatten(scheduler.schedule())
    assert second.token_references.rows.tolist() == [0, 1]
    assert second.token_references.step_ids.tolist() == [1, 1]
    assert second.token_references.sample_rows.tolist() == [0, 1]
    assert second.input_ids.tolist() == [0, 0, 3, 3]
    assert second.positions.tolist() == [3, 3, 0, 1]
    third = table.flatten(scheduler.schedule())
    assert third.token_references.step_ids.tolist() == [2, 2, 2]
    assert third.token_references.sample_rows.tolist() == [0, 1, 2]
    assert third.positions.tolist() == [4, 4, 2]


def test_references_follow_rows_that_move() -> None:
    scheduler = make_scheduler()
    table = make_table(max_num_seqs=8, num_groups=1)
    for sequence_id in (1, 2, 3):
        scheduler.add(make_sequence(sequence_id, [sequence_id]))
    table.flatten(scheduler.schedule())
    scheduler.abort(1)
    plan = table.flatten(scheduler.schedule())
    assert plan.sequence_ids.tolist() == [2, 3]
    assert plan.token_references.sample_rows.tolist() == [1, 2]


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_an_end_costs_the_rows_of_the_steps_in_flight_and_no_token(depth: int) -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, [7] * 3)
    scheduler.add(sequence)
    outputs = ahead(scheduler, depth)
    outcome = bring(scheduler, outputs[0], {1: EOS})
    assert outcome.finished == [sequence]
    assert sequence.finish_reason is FinishReason.STOP
    assert scheduler.schedule() is None
    for output in outputs[1:]:
        assert ids(output.steady) == [1], "a row in vain"
        assert num_used(scheduler) > 0, "it may still be written"
        outcome = bring(scheduler, output, {})
        assert (outcome.sequences, outcome.token_ids, outcome.finished) == ([], [], [])
    assert output_of(sequence) == [EOS]
    assert num_used(scheduler) == 0
    assert not scheduler.has_work


def test_a_length_that_is_known_costs_no_row() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, [7] * 3, max_tokens=3)
    scheduler.add(sequence)
    outputs = ahead(scheduler, 3)
    assert sequence.status is Status.ENDING
    assert scheduler.schedule() is None
    for output in outputs:
        outcome = bring(scheduler, output, {})
    assert outcome.finished == [sequence]
    assert output_of(sequence) == [5, 5, 5]
    assert num_used(scheduler) == 0


def test_a_preempted_sequence_takes_the_token_that_comes_late() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, [7] * 3, max_tokens=5)
    scheduler.add(sequence)
    first, second = ahead(scheduler, 2)
    scheduler.running.preempt(sequence)
    assert scheduler.schedule() is None, "its tokens aren't known yet"
    bring(scheduler, first, {1: 11})
    assert scheduler.schedule() is None
    bring(scheduler, second, {1: 12})
    assert (sequence.status, output_of(sequence)) == (Status.WAITING, [11, 12])
    assert num_used(scheduler) == 0
    (output,) = ahead(scheduler, 1)
    # All but the last of what was computed is found again, block by block.
    assert shares(output) == [(1, 1)]
    bring(scheduler, output, {1: 13})
    assert output_of(sequence) == [11, 12, 13]


def test_a_preempted_sequence_may_end_with_the_token_that_comes_late() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, [7] * 3)
    scheduler.add(sequence)
    first, second = ahead(scheduler, 2)
    scheduler.running.preempt(sequence)
    outcome = bring(scheduler, first, {1: EOS})
    assert outcome.finished == [sequence]
    assert len(scheduler.waiting) == 0
    assert bring(scheduler, second, {1: 12}).sequences == []
    assert output_of(sequence) == [EOS]
    assert not scheduler.has_work
    assert num_used(scheduler) == 0


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_what_comes_after_an_abort_or_a_stop_string_is_not_told(reason: FinishReason) -> None:
    scheduler = make_scheduler()
    leaving, staying = make_sequence(1, [7] * 3), make_sequence(2, [8] * 3)
    scheduler.add(leaving)
    scheduler.add(staying)
    first, second, third = ahead(scheduler, 3)
    bring(scheduler, first, {})
    scheduler.abort(1, reason=reason)
    for output in (second, third):
        outcome = bring(scheduler, output, {})
        assert (outcome.sequences, outcome.token_ids) == ([staying], [5])
    assert output_of(leaving) == [5]
    assert leaving.finish_reason is reason
    assert output_of(staying) == [5, 5, 5]
    scheduler.abort(2)
    assert num_used(scheduler) == 0


def test_who_lacks_blocks_that_are_coming_back_preempts_nobody() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=2, watermark=0.0)
    leaving = make_sequence(1, [7] * 3)
    staying = make_sequence(2, [8] * 3, ignore_eos=True)
    scheduler.add(leaving)
    scheduler.add(staying)
    first, second = ahead(scheduler, 2)  # both have two blocks, which are full with the second
    bring(scheduler, first, {1: EOS})
    bring_second = scheduler.schedule()  # two blocks are the first one's, until the second step
    assert bring_second is None
    assert staying.status is Status.RUNNING
    assert scheduler.running.num_preemptions == 0
    assert scheduler.running.stalled == {2}
    bring(scheduler, second, {})
    (third,) = ahead(scheduler, 1)
    assert shares(third) == [(2, 1)]
    assert staying.num_preemptions == 0


def test_blocks_behind_a_window_come_back_with_the_last_step_that_sees_them() -> None:
    scheduler = make_scheduler(block_size=2, windows=(2,))
    sequence = make_sequence(1, [7], max_tokens=20, ignore_eos=True)
    scheduler.add(sequence)
    outputs = ahead(scheduler, 6)
    # Six tokens are in three blocks, and a token sees two at most; no step is acknowledged.
    assert num_used(scheduler) == 3
    for output in outputs:
        bring(scheduler, output, {})
    assert num_used(scheduler) <= 2


def test_a_crash_takes_what_was_in_flight_with_it() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(1, [7] * 6, max_tokens=3, params={"prompt_logprobs": 0})
    scheduler.add(sequence)
    (first,) = ahead(scheduler, 1)
    assert sequence.num_scored_tokens == 5
    ahead(scheduler, 2)
    assert sequence.status is Status.ENDING
    scheduler.restart()
    scheduler.check_invariants()
    assert (sequence.status, sequence.num_scored_tokens) == (Status.WAITING, 0)
    with pytest.raises(AssertionError, match="no step is in flight"):
        finish(scheduler, first)
    again = scheduler.schedule()
    assert (again.step_id, shares(again)) == (1, [(1, 6)])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(0, 7), (7, 3), (0, Chunk(8))], ids=str)
def test_a_prompt_is_found_again_though_its_windows_have_moved_on(
    windows: tuple[int, ...], depth: int
) -> None:
    """Before the step that computed its end has brought anything."""
    for num_tokens in range(5, 37):
        scheduler = make_scheduler(block_size=4, windows=windows, max_num_batched_tokens=8)
        prompt = list(range(1, num_tokens + 1))
        scheduler.add(make_sequence(1, prompt, max_tokens=12))
        in_flight: list[SchedulerOutput] = []
        while scheduler.has_work:
            while len(in_flight) < depth and (output := scheduler.schedule()) is not None:
                in_flight.append(output)
            bring(scheduler, in_flight.pop(0), {})
        again = make_sequence(2, prompt)
        found = scheduler.cache.find_prefix(again).num_tokens
        assert found == (num_tokens - 1) // 4 * 4


def test_results_come_in_the_order_of_the_steps() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, [7] * 3))
    _, second = ahead(scheduler, 2)
    with pytest.raises(WorkerError, match="result of step 2 for step 1"):
        bring(scheduler, second, {})


def test_depth_changes_no_token() -> None:
    """Late workers, a pool that is too small, and blocks that nobody else may write."""
    tokens = []
    for depth in (1, 2, 3, 6):
        scheduler = make_scheduler(num_blocks=14, block_size=2, max_num_seqs=6)
        table = make_table(max_num_seqs=6, num_groups=1)
        workers = DelayedOracle(OracleExecutor(scheduler.cache.layout))
        sequences = [
            make_sequence(number, [number] * (1 + number % 5), max_tokens=12, seed=number)
            for number in range(12)
        ]
        for sequence in sequences:
            scheduler.add(sequence)
        while scheduler.has_work:
            while len(workers) < depth and (output := scheduler.schedule()) is not None:
                workers.submit(table.flatten(output))
            scheduler.update(workers.result())
            scheduler.check_invariants()
        assert num_used(scheduler) == 0
        tokens.append([output_of(each) for each in sequences])
        assert scheduler.running.num_preemptions > 0
    assert tokens == [tokens[0]] * 4
    for number, output in enumerate(tokens[0]):
        prompt = [number] * (1 + number % 5)
        assert output == oracle_continuation(prompt, max_tokens=12, seed=number)
