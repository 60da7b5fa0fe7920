"""How long a step may take, by what steps of its size have taken."""

import pytest

from runtime.executor.deadlines import FLOOR_S, NUM_KEPT, StepDeadlines, size_of
from tests.transport import example_plan

pytestmark = pytest.mark.wire


def test_what_was_never_seen_gets_all_the_time_there_is() -> None:
    deadlines = StepDeadlines(300.0)
    deadlines.learn(4, 0.02)
    assert deadlines.deadline_s(4, is_first=False) == FLOOR_S
    assert deadlines.deadline_s(5, is_first=False) == 300.0, "a long prompt is no hang"


def test_a_small_step_gets_no_more_than_a_larger_one() -> None:
    deadlines = StepDeadlines(300.0)
    deadlines.learn(9, 3.0)
    assert deadlines.deadline_s(2, is_first=False) == 30.0
    assert deadlines.deadline_s(9, is_first=True) == 90.0
    deadlines.learn(9, 100.0)
    assert deadlines.deadline_s(9, is_first=False) == 300.0


def test_a_slow_step_is_forgotten_after_many() -> None:
    deadlines = StepDeadlines(300.0)
    deadlines.learn(3, 9.0)
    for _ in range(NUM_KEPT):
        deadlines.learn(3, 2.0)
    assert deadlines.deadline_s(3, is_first=False) == 20.0


def test_size_counts_tokens_and_what_they_attend_to() -> None:
    plan = example_plan()
    assert size_of(plan) == len(plan.input_ids).bit_length()
