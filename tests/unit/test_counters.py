"""What an engine counts, and how it splits the time of a step."""

import pytest

from runtime.counters import Counters, StepTimes
from runtime.request import EngineStats, RankSummary, StepSummary
from runtime.scheduling.output import ScheduledSequence, SchedulerOutput
from runtime.scheduling.step_plan import Execution
from tests.scheduling import make_scheduler, make_sequence

pytestmark = pytest.mark.unit

TIMES = StepTimes(started=10.0, flattened=10.25, executed=12.25, published=12.375)
RANKS = (RankSummary(0, 0.125, 0.5, 0.25), RankSummary(1, 0.125, 0.75, 0.0))
EXECUTION = Execution(encode_s=0.125, ranks=RANKS)
OUTPUT = SchedulerOutput(
    step_id=7,
    steady=tuple(make_sequence(sequence_id, [1]) for sequence_id in (1, 2)),
    scheduled=(ScheduledSequence.of(make_sequence(3, range(40)), 30),),
    removed=(),
    added=(),
    changed=(),
    copies=(),
)


def stats_of(counters: Counters) -> EngineStats:
    return counters.stats(make_scheduler(max_num_seqs=5, max_num_batched_tokens=64))


def seconds_of(counters: Counters) -> dict[str, float]:
    """In all, of each part that was seen at least once."""
    parts = stats_of(counters).step_s
    names = ("schedule", "encode", "wire", "forward", "sample", "publish", "total")
    histograms = {name: getattr(parts, name) for name in names}
    return {name: each.sum for name, each in histograms.items() if each.count}


def test_the_parts_of_a_step_add_up() -> None:
    counters = Counters()
    counters.time(OUTPUT, EXECUTION, TIMES)
    seconds = seconds_of(counters)
    assert seconds == {
        "schedule": 0.25,
        "encode": 0.125,
        "wire": 2.0 - 0.125 - 0.5 - 0.25,
        "forward": 0.5,
        "sample": 0.25,
        "publish": 0.125,
        "total": 2.375,
    }
    assert sum(seconds.values()) == 2 * seconds["total"]


def test_an_executor_that_tells_nothing_was_on_the_wire() -> None:
    counters = Counters()
    counters.time(OUTPUT, None, TIMES)
    assert seconds_of(counters) == {"schedule": 0.25, "wire": 2.0, "publish": 0.125, "total": 2.375}
    stats = stats_of(counters)
    assert stats.ranks == ()


def test_no_part_is_below_nothing() -> None:
    counters = Counters()
    slow = Execution(encode_s=0.0, ranks=(RankSummary(0, 0.0, 9.0, 0.0),))
    counters.time(OUTPUT, slow, TIMES)
    assert seconds_of(counters)["wire"] == 0.0


def test_the_last_step_and_its_ranks_are_told() -> None:
    counters = Counters()
    assert stats_of(counters).last_step is None
    counters.time(OUTPUT, EXECUTION, TIMES)
    stats = stats_of(counters)
    assert stats.last_step == StepSummary(
        step_id=7,
        num_decode_sequences=2,
        num_prefill_sequences=1,
        num_prefill_tokens=30,
        total_s=2.375,
    )
    assert stats.ranks == RANKS


def test_epochs_count_from_1() -> None:
    counters = Counters()
    assert stats_of(counters).epoch == 1
    counters.num_restarts += 2
    assert stats_of(counters).epoch == 3


def test_limits_are_those_of_the_scheduler() -> None:
    stats = stats_of(Counters())
    assert (stats.max_num_seqs, stats.max_num_batched_tokens) == (5, 64)
