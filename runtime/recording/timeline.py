"""What a recording shows over time, and a trace of it for Chrome or Perfetto."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from protos import recording_pb2
from protos.recording_pb2 import Record
from runtime.recording.rows import RowsReader
from runtime.request import FinishReason

US_PER_S = 1_000_000
ENGINE, WORKERS, SEQUENCES = 1, 2, 3  # processes of the trace


@dataclass(slots=True)
class StepSpan:
    """One step; times are of the engine's clock."""

    step_id: int
    started_s: float  # scheduling began
    submitted_s: float
    num_decode_tokens: int
    num_prefill_tokens: int
    num_sequences: int
    num_waiting: int
    ended_s: float | None = None  # its result was there; None: it never was
    encode_s: float = 0.0
    ranks: tuple[tuple[float, float, float], ...] = ()  # seconds to prepare, forward, sample


@dataclass(slots=True)
class Life:
    """A sequence from its arrival on. `runs` are when it had blocks."""

    sequence_id: int
    num_prompt_tokens: int
    queued_s: float
    runs: list[tuple[float, float]] = field(default_factory=list)
    admitted_s: float | None = None  # it runs
    ended_s: float | None = None
    reason: str = ""


@dataclass(slots=True)
class Timeline:
    """All that the records tell."""

    steps: list[StepSpan] = field(default_factory=list)
    lives: dict[int, Life] = field(default_factory=dict)
    start_s: float = 0.0
    end_s: float = 0.0
    unix_s: float = 0.0  # of `start_s`


class _Reader:
    def __init__(self) -> None:
        self.timeline = Timeline()
        self._rows = RowsReader()
        self._steps: dict[int, StepSpan] = {}  # in flight
        self._decision = recording_pb2.Decision()
        self._num_waiting = 0

    def apply(self, record: Record) -> None:
        match record.WhichOneof("record"):
            case "header":
                self._begin(record.header)
            case "arrival":
                self._arrive(record.arrival)
            case "abort":
                reason = FinishReason(record.abort.reason).name.lower()
                self._end(record.abort.sequence_id, record.abort.now, reason)
            case "decision":
                self._decide(record.decision)
            case "plan":
                self._plan(record.plan)
            case "result":
                self._result(record.result)
            case "restart":
                self._steps.clear()

    def _begin(self, header: recording_pb2.Header) -> None:
        self._rows = RowsReader()
        if not self.timeline.unix_s:
            self.timeline.unix_s = header.unix_s
            self.timeline.start_s = self.timeline.end_s = header.clock_s

    def _arrive(self, arrival: recording_pb2.Arrival) -> None:
        for sequence_id in (arrival.sequence_id, *(each.sequence_id for each in arrival.forks)):
            self.timeline.lives[sequence_id] = Life(
                sequence_id, arrival.num_prompt_tokens, arrival.submitted_s
            )
            self._num_waiting += 1

    def _decide(self, decision: recording_pb2.Decision) -> None:
        self._decision = decision
        self.timeline.end_s = decision.now
        for sequence_id in decision.removed:
            life = self.timeline.lives.get(sequence_id)
            if life is not None and life.admitted_s is not None and life.ended_s is None:
                # It gives way, or its last step is under way.
                life.runs.append((life.admitted_s, decision.now))
                life.admitted_s = None
                self._num_waiting += 1
        for sequence_id in decision.added:
            life = self.timeline.lives.get(sequence_id)
            if life is not None:
                life.admitted_s = decision.now
                self._num_waiting -= 1

    def _plan(self, plan: recording_pb2.Plan) -> None:
        rows = self._rows.decode(plan)
        # A row that is fed one token is one that decodes, but for the rare last token of a prompt.
        num_decode = int(np.count_nonzero(rows.query_lens == 1))
        step = StepSpan(
            plan.step_id,
            self._decision.now,
            plan.submitted_s,
            num_decode,
            plan.num_tokens - num_decode,
            len(rows.sequence_ids),
            max(0, self._num_waiting),
        )
        self._steps[plan.step_id] = step
        self.timeline.steps.append(step)

    def _result(self, result: recording_pb2.Result) -> None:
        self.timeline.end_s = result.now
        step = self._steps.pop(result.step_id, None)
        if step is not None:
            step.ended_s = result.now
            step.encode_s = result.encode_s
            step.ranks = tuple((e.prepare_s, e.forward_s, e.sample_s) for e in result.ranks)
        for sequence_id in result.finished:
            self._end(sequence_id, result.now, "finished")

    def _end(self, sequence_id: int, now: float, reason: str) -> None:
        life = self.timeline.lives.get(sequence_id)
        if life is None or life.ended_s is not None:
            return
        life.ended_s, life.reason = now, reason
        if life.admitted_s is None:
            self._num_waiting -= 1
        else:
            life.runs.append((life.admitted_s, now))


def read_timeline(records: Iterable[Record]) -> Timeline:
    """Also of redacted recordings. Raises ValueError: a record misses one before it."""
    reader = _Reader()
    for record in records:
        reader.apply(record)
    return reader.timeline


def write_trace(timeline: Timeline, file: IO[str]) -> None:
    """In Chrome's trace event format, an event a line."""
    file.write('{"displayTimeUnit": "ms",\n')
    file.write(f'"otherData": {{"unix_s_at_0": {timeline.unix_s}}},\n"traceEvents": [\n')
    for index, event in enumerate(_events(timeline)):
        file.write(",\n" * bool(index) + json.dumps(event))
    file.write("\n]}\n")


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for pid, name in ((ENGINE, "engine"), (WORKERS, "workers"), (SEQUENCES, "sequences")):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    clock = _Clock(timeline.start_s)
    rank_ends: dict[int, float] = {}
    for step in timeline.steps:
        yield from _step_events(step, clock)
        yield from _rank_events(step, clock, rank_ends)
    for life in timeline.lives.values():
        yield from _life_events(life, clock, timeline.end_s)


@dataclass(frozen=True, slots=True)
class _Clock:
    start_s: float

    def us(self, time_s: float) -> float:
        return round((time_s - self.start_s) * US_PER_S, 1)

    def span(self, pid: int, tid: int, name: str, start_s: float, end_s: float) -> dict[str, Any]:
        start = self.us(start_s)
        length = max(0.0, self.us(end_s) - start)
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": length}

    def count(self, name: str, time_s: float, **values: int) -> dict[str, Any]:
        return {"ph": "C", "pid": ENGINE, "name": name, "ts": self.us(time_s), "args": values}


def _step_events(step: StepSpan, clock: _Clock) -> Iterator[dict[str, Any]]:
    sizes = {
        "decode tokens": step.num_decode_tokens,
        "prefill tokens": step.num_prefill_tokens,
        "sequences": step.num_sequences,
    }
    yield clock.span(ENGINE, 1, f"schedule {step.step_id}", step.started_s, step.submitted_s)
    tokens = {"decode": step.num_decode_tokens, "prefill": step.num_prefill_tokens}
    yield clock.count("tokens", step.started_s, **tokens)
    sequences = {"in step": step.num_sequences, "waiting": step.num_waiting}
    yield clock.count("sequences", step.started_s, **sequences)
    if step.ended_s is None:
        return
    # Steps in flight overlap, so that they can't be spans of one thread.
    common = {"cat": "step", "id": step.step_id, "pid": ENGINE, "name": f"step {step.step_id}"}
    yield common | {"ph": "b", "ts": clock.us(step.submitted_s), "args": sizes}
    yield common | {"ph": "e", "ts": clock.us(step.ended_s)}


def _rank_events(step: StepSpan, clock: _Clock, ends: dict[int, float]) -> Iterator[dict[str, Any]]:
    """Ranks tell how long they took, not when: a step is shown to end as its result comes.

    It can't have begun before it was handed over, nor before the ends of the step before it.
    """
    for rank, (_, forward_s, sample_s) in enumerate(step.ranks if step.ended_s else ()):
        assert step.ended_s is not None
        latest = step.ended_s - forward_s - sample_s
        start = max(latest, step.submitted_s, ends.get(rank, 0.0))
        ends[rank] = start + forward_s + sample_s
        yield clock.span(WORKERS, rank, f"forward {step.step_id}", start, start + forward_s)
        if sample_s:
            name = f"sample {step.step_id}"
            yield clock.span(WORKERS, rank, name, start + forward_s, ends[rank])


def _life_events(life: Life, clock: _Clock, end_s: float) -> Iterator[dict[str, Any]]:
    args = {"prompt tokens": life.num_prompt_tokens, "ended": life.reason}
    ended = end_s if life.ended_s is None else life.ended_s
    runs = list(life.runs)
    if life.admitted_s is not None and life.ended_s is None:
        runs.append((life.admitted_s, end_s))
    common = {"cat": "sequence", "id": life.sequence_id, "pid": SEQUENCES}
    whole = common | {"name": f"sequence {life.sequence_id}"}
    yield whole | {"ph": "b", "ts": clock.us(life.queued_s), "args": args}
    since = life.queued_s
    for start, end in runs:
        if start > since:
            yield common | {"ph": "b", "name": "waits", "ts": clock.us(since)}
            yield common | {"ph": "e", "name": "waits", "ts": clock.us(start)}
        yield common | {"ph": "b", "name": "runs", "ts": clock.us(start)}
        yield common | {"ph": "e", "name": "runs", "ts": clock.us(end)}
        since = end
    yield whole | {"ph": "e", "ts": clock.us(ended)}
