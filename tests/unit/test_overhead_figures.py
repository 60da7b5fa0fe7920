"""What the overhead benchmark makes of the times of steps."""

import pytest

from benchmarks.overhead.figures import StepTimes, idle_share, intervals_s, lost_share, mean_late_s

pytestmark = pytest.mark.unit


def step(step_id: int, started: float, due: float, ended: float) -> StepTimes:
    return StepTimes(step_id, started, due, ended)


def test_idle_is_what_no_step_covers_of_the_window() -> None:
    steps = [step(1, 0.0, 2.0, 2.0), step(2, 3.0, 4.0, 4.5), step(3, 5.0, 9.0, 9.0)]
    # From 1 to 6: idle from 2 to 3 and from 4.5 to 5; the first and the last are cut.
    assert idle_share(steps, 1.0, 6.0) == pytest.approx(1.5 / 5)


def test_lost_is_what_no_step_needs_of_the_window() -> None:
    steps = [step(1, 0.0, 2.0, 2.0), step(2, 3.0, 4.0, 4.5), step(3, 5.0, 9.0, 9.0)]
    # As above, and step 2 took half a second more than it should.
    assert lost_share(steps, 1.0, 6.0) == pytest.approx(2.0 / 5)
    assert lost_share([step(1, 0.0, 0.5, 2.0)], 1.0, 6.0) == 1.0  # its own time was before


def test_a_window_without_steps_is_idle() -> None:
    assert idle_share([], 1.0, 6.0) == 1.0


def test_steps_are_told_by_their_starts_and_by_how_late_they_end() -> None:
    steps = [step(1, 0.0, 2.0, 2.0), step(2, 3.0, 4.0, 4.5), step(3, 5.0, 9.0, 9.1)]
    assert intervals_s(steps) == [2.0, 3.0]
    assert mean_late_s(steps) == pytest.approx(0.2)
