"""When `make bench-guard` fails, and with what words."""

import json

import pytest

from benchmarks.guard.cli import BOUNDS, guard_workloads, too_slow

pytestmark = pytest.mark.unit


def test_the_median_decides_and_the_message_has_both_numbers() -> None:
    assert too_slow({"batch": [0.1, 0.5, 0.6]}, {"batch": 0.5}) == []
    (line,) = too_slow({"batch": [0.1, 0.4, 0.6], "single": [0.2]}, {"batch": 0.5, "single": 0.1})
    assert line == (
        "batch: the engine has 0.400 of the speed of its matrix products, and must have 0.5 at "
        "least (benchmarks/guard/bounds.json); pairs: 0.100, 0.400, 0.600"
    )
    with pytest.raises(KeyError):
        too_slow({"other": [1.0]}, {})


def test_every_workload_has_a_bound() -> None:
    bounds = json.loads(BOUNDS.read_text("utf-8"))
    assert bounds.keys() == {each.name for each in guard_workloads()}
    assert all(0 < bound < 1 for bound in bounds.values())
