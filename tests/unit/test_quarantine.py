"""Sequences that were in a step when an epoch ended: who runs alone, and who isn't run again."""

from dataclasses import replace

import pytest

from runtime.errors import ModelOutputError
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import StepPlan
from tests.scheduling import make_scheduler, make_sequence
from tests.steps import OracleRun, assert_right, output_of

pytestmark = pytest.mark.unit


def decide(run: OracleRun) -> tuple[set[int], StepPlan]:
    """Schedules a step; returns who is in it, and its plan."""
    output = run.scheduler.schedule()
    assert output is not None
    behind = {each.sequence.sequence_id for each in output.scheduled}
    plan = run.table.flatten(output)
    return {each.sequence_id for each in output.steady} | behind, detach(plan)


def detach(plan: StepPlan) -> StepPlan:
    """With its tables as they are now."""
    return replace(plan, block_tables=tuple(plan.block_tables))


def crash(run: OracleRun, *, is_outside: bool = False) -> set[int]:
    """Ends the epoch with a step in flight; returns who was in it."""
    ids, _ = decide(run)
    run.scheduler.restart(is_outside=is_outside)
    run.executor.restart()
    run.scheduler.check_invariants()
    return ids


def three(scheduler: Scheduler) -> list[Sequence]:
    sequences = [make_sequence(i, [i, 2, 3], max_tokens=8, ignore_eos=True) for i in (1, 2, 3)]
    for each in sequences:
        scheduler.add(each)
    return sequences


def test_after_two_ends_each_runs_alone_until_it_has_a_token() -> None:
    run = OracleRun(make_scheduler())
    sequences = three(run.scheduler)
    assert crash(run) == {1, 2, 3}
    assert crash(run) == {1, 2, 3}, "once may be chance"
    seen = []
    for _ in range(3):
        ids, plan = decide(run)
        seen.append(ids)
        run.scheduler.update(run.executor.execute(plan))
        run.scheduler.check_invariants()
    assert seen == [{1}, {2}, {3}]
    run.finish()
    assert_right(sequences)
    assert run.scheduler.take_dropped() == []


def test_one_that_ends_two_epochs_alone_is_dropped_and_the_others_go_on() -> None:
    run = OracleRun(make_scheduler())
    sequences = three(run.scheduler)
    for ids in ({1, 2, 3}, {1, 2, 3}, {1}, {1}):
        assert crash(run) == ids
    [(poison, error)] = run.scheduler.take_dropped()
    assert poison is sequences[0]
    assert isinstance(error, ModelOutputError)
    assert "twice while this request ran alone" in str(error)
    run.finish()
    assert_right(sequences[1:])


def test_a_token_clears_a_sequence() -> None:
    run = OracleRun(make_scheduler())
    only = make_sequence(1, [1, 2], max_tokens=8, ignore_eos=True)
    run.scheduler.add(only)
    for _ in range(4):
        assert crash(run) == {1}
        run.step()
    run.finish()
    assert len(output_of(only)) == 8


def test_what_comes_from_outside_is_held_against_nobody() -> None:
    run = OracleRun(make_scheduler())
    three(run.scheduler)
    for _ in range(5):
        assert crash(run, is_outside=True) == {1, 2, 3}
    assert run.scheduler.take_dropped() == []


def test_those_that_come_meanwhile_wait() -> None:
    run = OracleRun(make_scheduler())
    three(run.scheduler)
    crash(run)
    crash(run)
    late = make_sequence(9, [9, 9], max_tokens=2, ignore_eos=True)
    run.scheduler.add(late)
    ids, plan = decide(run)
    assert ids == {1}
    run.scheduler.update(run.executor.execute(plan))
    run.finish()
    assert len(output_of(late)) == 2


def test_a_suspect_that_is_aborted_makes_way() -> None:
    run = OracleRun(make_scheduler())
    three(run.scheduler)
    crash(run)
    crash(run)
    run.scheduler.abort(1)
    run.scheduler.check_invariants()
    assert decide(run)[0] == {2}


def test_a_suspect_is_admitted_once_the_step_that_had_others_is_through() -> None:
    """At depth 2 the step after the one that clears the first suspect is out already."""
    run = OracleRun(make_scheduler())
    three(run.scheduler)
    crash(run)
    crash(run)
    (first_ids, first), (second_ids, second) = decide(run), decide(run)
    assert first_ids == second_ids == {1}
    run.scheduler.update(run.executor.execute(first))
    assert run.scheduler.schedule() is None, "the second step has the first suspect"
    run.scheduler.update(run.executor.execute(second))
    assert decide(run)[0] == {2}
