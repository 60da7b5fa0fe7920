"""Counting values by bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import histogram
from runtime.histogram import Histogram, HistogramSnapshot

pytestmark = pytest.mark.unit

ALL_BOUNDS = [
    histogram.FIRST_TOKEN_S,
    histogram.TOKEN_GAP_S,
    histogram.REQUEST_S,
    histogram.STEP_S,
    histogram.NUM_TOKENS,
]


def test_a_value_counts_at_the_first_bound_that_it_does_not_exceed() -> None:
    seen = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        seen.observe(value)
    assert seen.snapshot() == HistogramSnapshot((1.0, 2.0), (2, 2, 1), 7.5)


def test_a_value_may_count_many_times() -> None:
    seen = Histogram((1.0, 2.0))
    seen.observe(1.5, 256)
    assert seen.snapshot() == HistogramSnapshot((1.0, 2.0), (0, 256, 0), 384.0)


def test_a_snapshot_stays_as_it_was() -> None:
    seen = Histogram((1.0,))
    before = seen.snapshot()
    seen.observe(5.0)
    assert (before.counts, before.sum, before.count) == ((0, 0), 0.0, 0)
    assert seen.snapshot().count == 1


@given(st.lists(st.floats(0, 1e5)), st.lists(st.floats(0, 1e5), unique=True).map(sorted))
def test_counts_are_those_of_prometheus(values: list[float], bounds: list[float]) -> None:
    seen = Histogram(bounds)
    for value in values:
        seen.observe(value)
    counts = seen.snapshot().counts
    for index, bound in enumerate(bounds):
        assert sum(counts[: index + 1]) == sum(value <= bound for value in values)
    assert sum(counts) == len(values)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (2.0, 1.0)])
def test_bounds_must_ascend(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must ascend"):
        Histogram(bounds)


def test_a_snapshot_has_one_count_more_than_bounds() -> None:
    with pytest.raises(ValueError, match="counts has 2 values, bounds has 2"):
        HistogramSnapshot((1.0, 2.0), (0, 1), 0.0)


@pytest.mark.parametrize("bounds", ALL_BOUNDS)
def test_our_bounds_ascend_from_above_zero(bounds: tuple[float, ...]) -> None:
    assert Histogram(bounds).bounds[0] > 0
