"""Traces and pictures of recordings."""

import builtins
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.recording.plot import plot_batches
from runtime.recording.timeline import Life, Timeline, read_timeline, write_trace
from runtime.request import RankSummary
from runtime.scheduling.step_plan import Execution, StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks
from tests.recording import STEP_S, RecordedEngine, live_at_random, make_setup, read
from tests.served import ScoringOracle

pytestmark = pytest.mark.wire

FORWARD_S, SAMPLE_S = 0.004, 0.001


class TimedOracle(ScoringOracle):
    """Tells where the time went, as GrpcExecutor does."""

    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        result = super().execute(plan, masks)
        ranks = (
            RankSummary(0, 0.0001, FORWARD_S, SAMPLE_S),
            RankSummary(1, 0.0001, FORWARD_S, 0.0),
        )
        return replace(result, execution=Execution(0.0002, ranks))


def timeline_of(folder: Path) -> Timeline:
    return read_timeline(read(folder).records())


def trace_of(timeline: Timeline) -> list[dict[str, Any]]:
    file = io.StringIO()
    write_trace(timeline, file)
    trace = json.loads(file.getvalue())
    assert trace["otherData"]["unix_s_at_0"] == 1e9
    return trace["traceEvents"]


@pytest.mark.parametrize("redact", [False, True])
def test_steps_and_lives(tmp_path: Path, redact: bool) -> None:
    engine = RecordedEngine(tmp_path, TimedOracle, depth=1, redact=redact)
    engine.add(1, [5] * 30, params={"ignore_eos": True})
    engine.step()
    engine.step()
    engine.add(2, [6] * 3, params={"n": 2, "ignore_eos": True})
    engine.step()
    engine.engine.abort(engine.connection, 2, 1)
    engine.drain()
    engine.recorder.close()
    timeline = timeline_of(tmp_path)
    assert [(s.num_decode_tokens, s.num_prefill_tokens) for s in timeline.steps[:4]] == [
        (0, 24),
        (0, 6),
        (1, 3),
        (2, 0),
    ]
    assert [each.num_sequences for each in timeline.steps[:4]] == [1, 1, 2, 2]
    assert timeline.steps[0].ranks == ((0.0001, FORWARD_S, SAMPLE_S), (0.0001, FORWARD_S, 0.0))
    first, second, aborted = timeline.lives.values()
    assert (first.num_prompt_tokens, first.queued_s, first.reason) == (30, 100.0, "finished")
    assert second.queued_s == pytest.approx(100 + 2 * STEP_S)
    assert second.runs[0][0] == pytest.approx(100 + 2 * STEP_S)
    assert (aborted.reason, aborted.runs) == ("stop", [])


def test_the_trace_is_in_order_and_complete(tmp_path: Path) -> None:
    setup = make_setup(num_blocks=30)
    engine = RecordedEngine(tmp_path, TimedOracle, depth=2, setup=setup)
    live_at_random(engine, seed=3, num_requests=30)
    engine.recorder.close()
    timeline = timeline_of(tmp_path)
    assert any(len(each.runs) > 1 for each in timeline.lives.values())  # preempted
    events = trace_of(timeline)
    assert {each["ph"] for each in events} == {"M", "X", "C", "b", "e"}
    opened = [each for each in events if each["ph"] == "b"]
    closed = [each for each in events if each["ph"] == "e"]
    assert len(opened) == len(closed) > 0
    steps = [each for each in opened if each["name"].startswith("step ")]
    assert len(steps) == len(engine.ranks.plans)
    for rank in (0, 1):
        spans = [each for each in events if each["pid"] == 2 and each.get("tid") == rank]
        spans = [each for each in spans if each["ph"] == "X"]
        ends = [each["ts"] + each["dur"] for each in spans]
        starts = [each["ts"] for each in spans]
        assert all(start >= end - 0.2 for start, end in zip(starts[1:], ends, strict=False))
    assert all(each["ts"] >= 0 for each in events if "ts" in each)


def test_who_waits_and_runs() -> None:
    life = Life(4, 10, queued_s=1.0, runs=[(1.5, 2.0), (3.0, 4.0)], ended_s=4.0, reason="finished")
    timeline = Timeline(lives={4: life}, start_s=0.0, end_s=9.0, unix_s=1e9)
    spans = [
        (each["ph"], each["name"], each["ts"] / 1e6) for each in trace_of(timeline) if "ts" in each
    ]
    assert spans == [
        ("b", "sequence 4", 1.0),
        ("b", "waits", 1.0),
        ("e", "waits", 1.5),
        ("b", "runs", 1.5),
        ("e", "runs", 2.0),
        ("b", "waits", 2.0),
        ("e", "waits", 3.0),
        ("b", "runs", 3.0),
        ("e", "runs", 4.0),
        ("e", "sequence 4", 4.0),
    ]


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RecordedEngine(tmp_path, TimedOracle)
    live_at_random(engine, seed=1, num_requests=10)
    engine.recorder.close()
    timeline = timeline_of(tmp_path)
    plot_batches(timeline, tmp_path / "batch.png")
    assert (tmp_path / "batch.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="has no step that came to its end"):
        plot_batches(Timeline(), tmp_path / "batch.png")

    find = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return find(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"needs matplotlib.*lockstep-serving\[bench\]"):
        plot_batches(timeline, tmp_path / "batch.png")
