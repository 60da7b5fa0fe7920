"""`python -m benchmarks chaos`: its plan, what it reads of a log, what it compares and refuses."""

import io
import json
import os
import signal
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks
from benchmarks.chaos.asks import KINDS as ASK_KINDS
from benchmarks.chaos.asks import draw_asks
from benchmarks.chaos.client import Choice
from benchmarks.chaos.engine_log import Event, event_of
from benchmarks.chaos.faults import KINDS, plan_faults
from benchmarks.chaos.findings import Finding, Result
from benchmarks.chaos.load import Tally, difference
from benchmarks.chaos.observer import limit_of
from benchmarks.chaos.server import Leftovers, running

pytestmark = pytest.mark.unit

FINDING = Finding(number=1, kind="kill", victim="rank 0", at_s=1.0, detection_s=0.5, recovery_s=7.0)


def log_line(message: str, **changes: Any) -> str:
    record = {
        "time": "2026-11-30T11:34:50.250+00:00",
        "level": "ERROR",
        "logger": "runtime.engine",
        "message": message,
    }
    return json.dumps(record | changes)


def refusal(*options: str) -> str:
    result = CliRunner().invoke(benchmarks, ["chaos", *options])
    assert result.exit_code == 2
    return result.output


def good_result(**changes: Any) -> Result:
    fields = {
        "findings": [FINDING],
        "disturbed": Tally(num_requests=9),
        "idle_s": 0.1,
        "leftovers": Leftovers(exit_code=0),
    }
    return Result(**fields | changes)


@pytest.mark.timeout(20)
def test_a_run_that_fails_ends_its_server() -> None:
    log = io.StringIO()
    script = "import sys, time; print('there', file=sys.stderr, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", script]
    with pytest.raises(KeyError), running(command, os.environ, log) as (process, _):
        raise KeyError
    assert process.returncode == -signal.SIGKILL


def test_each_kind_of_fault_comes_as_often_as_the_others() -> None:
    plans = list(islice(plan_faults(KINDS, seed=4), 3 * len(KINDS)))
    assert Counter(each.kind for each in plans) == dict.fromkeys(KINDS, 3)
    assert {each.rank for each in plans} == {0, 1}
    assert list(islice(plan_faults(KINDS, seed=4), 3 * len(KINDS))) == plans
    assert list(islice(plan_faults(KINDS, seed=5), 3 * len(KINDS))) != plans


def test_requests_are_the_same_each_time_and_of_all_kinds_in_both_ways() -> None:
    asks = draw_asks(2 * len(ASK_KINDS))
    assert asks == draw_asks(2 * len(ASK_KINDS))
    ways = Counter((each.name.split("(")[1].split(",")[0], each.way) for each in asks)
    assert max(ways.values()) <= 2
    assert {way for _, way in ways} == {"grpc", "http"}
    assert len({each.params["seed"] for each in asks}) == len(asks)


def test_a_log_tells_of_ends_and_returns_of_workers() -> None:
    at = 1796038490.25
    assert event_of(log_line("the workers are lost: rank 1 died")) == Event(
        at, "lost", "rank 1 died"
    )
    back = event_of(log_line("the workers are back; they were lost since rank 1 died"))
    assert back is not None
    assert (back.at, back.kind) == (at, "back")


@pytest.mark.parametrize(
    "line",
    [
        "[rank 0] the workers are lost: no",
        log_line("the workers are lost: no", logger="runtime.other"),
        log_line("the workers can't be started: no"),
        "[1, 2]",
        "",
    ],
)
def test_other_lines_tell_nothing(line: str) -> None:
    assert event_of(line) is None


@pytest.mark.parametrize(
    ("kind", "cause", "limit_s"),
    [
        ("kill", "step 7 failed: rank 1: killed by signal 9", 5),
        ("late", "rank 0, 1 did not reply to step 137 within 20.4 s", 22.4),
        ("stop", "rank 1 on 127.0.0.1 is gone: it has been silent for 3 s", 5),
        ("stop", "step 54 failed: rank 1: UNAVAILABLE: Stream removed (ping timeout)", 12),
    ],
)
def test_what_is_silent_may_take_its_deadline_to_be_noticed(
    kind: str, cause: str, limit_s: float
) -> None:
    assert limit_of(kind, cause) == pytest.approx(limit_s)


def test_the_first_token_that_differs_is_told() -> None:
    expected = {0: Choice([1, 2, 3], "abc", "stop"), 1: Choice([4, 5], "de", "length")}
    assert (
        difference(
            {0: Choice([1, 2, 3], "abc", "stop"), 1: Choice([4, 6], "df", "length")}, {**expected}
        )
        == "choice 1, token 1: 6, undisturbed 5"
    )
    shorter = difference({**expected, 0: Choice([1, 2], "ab", "length")}, expected)
    assert "2 tokens" in shorter
    assert "undisturbed 3" in shorter


def test_a_good_run_has_nothing_to_complain_of() -> None:
    result = good_result()
    assert list(result.complaints()) == []
    metrics = result.metrics()
    assert metrics["requests_lost"] == metrics["outputs_differing"] == 0
    assert metrics["detection_s_max"] == metrics["detection_s_max_kill"] == 0.5
    assert metrics["recovery_s_max"] == 7.0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"disturbed": Tally(lost=["request 3: UNAVAILABLE"])}, "request 3: UNAVAILABLE"),
        ({"disturbed": Tally(differing=["request 4: token 1"])}, "request 4: token 1"),
        ({"undisturbed": Tally(differing=["request 5: token 2"])}, "undisturbed"),
        ({"findings": [replace(FINDING, complaints=("late",))]}, "fault 1 (kill): late"),
        ({"idle_s": None}, "not idle"),
        ({"leftovers": Leftovers(exit_code=1)}, "code 1"),
        ({"leftovers": Leftovers(exit_code=0, things=["/dev/shm/x"])}, "/dev/shm/x"),
    ],
)
def test_a_run_complains_of_whatever_was_otherwise(changes: dict[str, Any], complaint: str) -> None:
    complaints = list(good_result(**changes).complaints())
    assert len(complaints) == 1
    assert complaint in complaints[0]


def test_what_needs_a_second_node_is_refused_by_name() -> None:
    assert "kind raylet needs --nodes 2" in refusal("--kind=raylet")
    assert "kind network needs --nodes 2" in refusal("--kind=kill", "--kind=network")
    assert "nodes=2 needs --launcher ray" in refusal("--nodes=2")
