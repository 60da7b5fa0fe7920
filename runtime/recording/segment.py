"""Recorded steps that run again by themselves: first what the cache held, then they.

Blocks get other numbers, so that only as many are needed as the steps touch.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from protos import recording_pb2
from protos.recording_pb2 import Record
from runtime.arrays import INT32, unpack
from runtime.errors import ConfigError
from runtime.executor.base import Executor
from runtime.recording.arrays import arrays_of, build, decode_arrays
from runtime.recording.arrivals import Arrived, decode_arrival
from runtime.recording.contents import KEPT_STEPS, Contents, decode_contents
from runtime.recording.encoder import Late
from runtime.recording.fill import Places, Pool, fill_plans
from runtime.recording.needs import Needs
from runtime.recording.reader import RecordFile, Recording
from runtime.recording.setup import SchedulerSetup, decode_setup
from runtime.scheduling.cache_layout import CacheLayout
from runtime.scheduling.sampler_inputs import no_inputs
from runtime.scheduling.step_plan import StepPlan, no_references

if TYPE_CHECKING:
    from array import array


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first token that isn't the recorded one."""

    step_id: int
    row: int
    sequence_id: int
    token: int | None
    recorded: int

    def __str__(self) -> str:
        token = "no token" if self.token is None else f"token {self.token}"
        return (
            f"step {self.step_id}, row {self.row}, sequence {self.sequence_id}: {token}, "
            f"recorded {self.recorded}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """What came of running a segment."""

    num_steps: int  # that gave the same tokens
    num_tokens: int
    num_prefilled: int
    num_blocks: int
    difference: TokenDifference | None


@dataclass(slots=True)
class RecordedStep:
    """A step, and what it has brought."""

    plan: StepPlan
    ended: set[int]  # sequences of its rows that had ended before
    late: Late | None = None
    token_ids: list[int] | None = None
    skipped: set[int] = field(default_factory=set)  # rows with faults, or of ended sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps whose references are resolved and whose blocks are those of `layout`."""

    layout: CacheLayout
    fills: list[StepPlan]  # to be run first
    steps: list[RecordedStep]


class _Follower:
    """Reads records up to the last wanted result."""

    def __init__(self, setup: SchedulerSetup, first_step: int, num_steps: int | None) -> None:
        self.contents = Contents(setup.layout.block_size)
        self.steps: dict[int, RecordedStep] = {}  # wanted ones, in their order
        self.samples: dict[int, list[int]] = {}  # by step, all that somebody may refer to
        self.ended: set[int] = set()
        self._first_step = first_step
        self._end = None if num_steps is None else first_step + num_steps
        self._is_new = True

    @property
    def is_done(self) -> bool:
        last = None if self._end is None else self.steps.get(self._end - 1)
        return last is not None and last.token_ids is not None

    def apply(self, record: Record) -> None:
        match record.WhichOneof("record"):
            case "contents":
                if self._is_new:
                    self._start(record.contents)
            case "arrival":
                arrival = record.arrival
                self.contents.add(Arrived.of(decode_arrival(arrival), arrival.now))
            case "abort":
                self.contents.forget([record.abort.sequence_id])
                self.ended.add(record.abort.sequence_id)
            case "full_plan":
                self._run(record.full_plan)
            case "late_inputs":
                step = self.steps.get(record.late_inputs.step_id)
                if step is not None:
                    step.late = build(Late, decode_arrays(record.late_inputs.arrays))
            case "result":
                self._take(record.result)
        self._is_new = self._is_new and not record.HasField("contents")

    def _start(self, message: recording_pb2.CacheContents) -> None:
        self.contents = decode_contents(message, self.contents.block_size)
        for step_id, sampled in self.contents.samples.items():
            if sampled.token_ids is not None:
                self.samples[step_id] = sampled.token_ids

    def _run(self, message: recording_pb2.FullPlan) -> None:
        plan = build(
            StepPlan,
            decode_arrays(message.arrays),
            step_id=message.step_id,
            defer_sampling=message.defer_sampling,
        )
        if not any(array.size for _, array in arrays_of(plan.sampler_inputs)):
            plan = replace(plan, sampler_inputs=no_inputs())  # which executors know by identity
        if plan.step_id < self._first_step:
            self.contents.run(plan)
        elif self._end is None or plan.step_id < self._end:
            ended = self.ended.intersection(plan.sequence_ids.tolist())
            self.steps[plan.step_id] = RecordedStep(plan, ended)

    def _take(self, result: recording_pb2.Result) -> None:
        token_ids = unpack(INT32, "token_ids", result.token_ids)
        step = self.steps.get(result.step_id)
        if step is not None:
            step.token_ids = token_ids
            step.skipped = {*unpack(INT32, "fault_rows", result.fault_rows)}
            sampled = step.plan.sequence_ids[step.plan.sample_sequence].tolist()
            step.skipped.update(row for row, each in enumerate(sampled) if each in self.ended)
        elif result.step_id < self._first_step:
            self.contents.take(result.step_id, token_ids)
        self.samples[result.step_id] = token_ids
        if step is None:
            self.samples.pop(result.step_id - KEPT_STEPS, None)
        self.contents.forget(result.finished)
        self.ended.update(result.finished)


def read_segment(recording: Recording, *, first_step: int | None, num_steps: int | None) -> Segment:
    """Steps from `first_step` on, the first that there is; all to the end where not limited.

    Raises ConfigError: the recording has no whole steps, or not these.
    """
    header = recording.header
    if header.redacted or not header.has_steps:
        what = "is redacted" if header.redacted else "has no whole steps"
        raise ConfigError(
            f"run {header.run} {what}: to run steps again, record with --record-steps"
        )
    setup = decode_setup(header.setup)
    starts = [(first, file) for file in recording.files if (first := _first_step_of(file))]
    if not starts:
        raise ConfigError(f"run {header.run} has no step")
    first = starts[0][0] if first_step is None else first_step
    before = [file for number, file in starts if number <= first]
    if not before:
        raise ConfigError(f"from_step={first}: the recording begins with step {starts[0][0]}")
    follower = _Follower(setup, first, num_steps)
    for record in recording.records(before[-1]):
        follower.apply(record)
        if follower.is_done:
            break
    steps = [each for each in follower.steps.values() if each.token_ids is not None]
    if not steps:
        raise ConfigError(f"from_step={first}: the recording has no such step that came to its end")
    for step in steps:
        step.plan = _resolve(step.plan, follower.samples)
    return _lay_out(setup, follower.contents, steps)


def run_segment(executor: Executor, segment: Segment) -> RunVerdict:
    """On workers with a cache of the segment's layout. Stops at the first other token."""
    num_steps = num_tokens = 0
    step_ids = iter(range(1, len(segment.fills) + len(segment.steps) + 1))
    for plan in segment.fills:
        executor.submit(replace(plan, step_id=next(step_ids)))
        executor.result()
    difference = None
    for step in segment.steps:
        difference = _run_step(executor, step, next(step_ids))
        if difference is not None:
            break
        num_steps += 1
        num_tokens += len(step.plan.sample_index) - len(step.skipped)
    return RunVerdict(
        num_steps=num_steps,
        num_tokens=num_tokens,
        num_prefilled=sum(len(each.input_ids) for each in segment.fills),
        num_blocks=segment.layout.num_blocks,
        difference=difference,
    )


def _run_step(executor: Executor, step: RecordedStep, step_id: int) -> TokenDifference | None:
    plan = step.plan
    executor.submit(replace(plan, step_id=step_id))
    if plan.defer_sampling:
        assert step.late is not None, "a step that has a result was told what it waited for"
        executor.sample(step_id, step.late.inputs, step.late.masks)
    result = executor.result()
    wanted = step.token_ids or []
    for row, (mine, theirs) in enumerate(zip(result.token_ids, wanted, strict=True)):
        token = None if row in result.faults else mine
        if row not in step.skipped and token != theirs:
            sequence_id = result.sequence_ids[row]
            return TokenDifference(plan.step_id, row, sequence_id, token, theirs)
    return None


def _first_step_of(file: RecordFile) -> int:
    """0: it has none."""
    records = Recording([file]).records()
    return next((each.full_plan.step_id for each in records if each.HasField("full_plan")), 0)


def _resolve(plan: StepPlan, samples: dict[int, list[int]]) -> StepPlan:
    """With the tokens that it refers to."""
    refer = plan.token_references
    input_ids = plan.input_ids.copy()
    for row, step_id, sample in zip(
        refer.rows.tolist(), refer.step_ids.tolist(), refer.sample_rows.tolist(), strict=True
    ):
        input_ids[row] = samples[step_id][sample]
    return replace(plan, input_ids=input_ids, token_references=no_references())


def _lay_out(setup: SchedulerSetup, contents: Contents, steps: list[RecordedStep]) -> Segment:
    pool = Pool()
    needs = Needs(contents)
    for step in steps:
        needs.add(step.plan, step.ended)
        step.plan = _renumber(step.plan, pool)
    texts: dict[int, tuple[array[int], Places]] = {}
    for block, held in needs.blocks.items():
        _, places = texts.setdefault(id(held.text), (held.text, {}))
        places[held.group, held.place] = pool.number(block)
    chunk = setup.limits.max_chunk_tokens
    fills = [
        plan
        for text, places in texts.values()
        for plan in fill_plans(setup.layout, text, places, pool, chunk=chunk)
    ]
    layout = replace(setup.layout, num_blocks=pool.size)
    return Segment(layout=layout, fills=fills, steps=steps)


def _renumber(plan: StepPlan, pool: Pool) -> StepPlan:
    tables = tuple(
        replace(
            table,
            block_ids=np.array([pool.number(each) for each in table.block_ids.tolist()], np.int32),
        )
        for table in plan.block_tables
    )
    copies = [pool.number(each) for each in plan.block_copies.ravel().tolist()]
    return replace(
        plan,
        block_tables=tables,
        block_copies=np.array(copies, np.int32).reshape(-1, 2),
    )
