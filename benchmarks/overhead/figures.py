"""When steps ran on rank 0, and what that says."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class StepTimes(NamedTuple):
    """Of a step on the device's thread, in seconds of `perf_counter`, which all processes share."""

    step_id: int
    started: float
    due: float  # when its time was over
    ended: float


def idle_share(steps: Sequence[StepTimes], begin: float, end: float) -> float:
    """Share of the window in which none of the steps ran; `steps` are all that ran in it."""
    busy_s = sum(min(each.ended, end) - max(each.started, begin) for each in steps)
    return 1 - busy_s / (end - begin)


def lost_share(steps: Sequence[StepTimes], begin: float, end: float) -> float:
    """Share of the window that isn't a step's own time: idle, or late for whatever reason."""
    own_s = sum(max(0.0, min(each.due, end) - max(each.started, begin)) for each in steps)
    return 1 - own_s / (end - begin)


def intervals_s(steps: Sequence[StepTimes]) -> list[float]:
    """From the start of each step to that of the next one, ascending."""
    return sorted(after.started - before.started for before, after in pairwise(steps))


def mean_late_s(steps: Sequence[StepTimes]) -> float:
    """By how much they took longer than they should."""
    return sum(each.ended - each.due for each in steps) / len(steps)
