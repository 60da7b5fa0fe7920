"""What happens to an engine, as records. For one thread, the writer's."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from protos import recording_pb2
from protos.recording_pb2 import Record
from runtime.arrays import INT32, pack
from runtime.recording.arrays import encode_arrays
from runtime.recording.arrivals import Arrived, encode_arrival
from runtime.recording.contents import Contents
from runtime.recording.rows import RowsWriter
from runtime.recording.setup import SchedulerSetup, encode_setup
from runtime.request import FinishReason
from runtime.scheduling.output import SchedulerOutput
from runtime.scheduling.sampler_inputs import SamplerInputs
from runtime.scheduling.snapshot import SchedulerState
from runtime.scheduling.step_plan import Execution, StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose recording it is, and what is in it."""

    run: str
    setup: SchedulerSetup
    model: str
    fingerprint: str
    depth: int
    options: dict[str, str]
    unix_s: float  # and of the engine's clock, of one moment
    clock_s: float
    redact: bool = False
    steps: bool = False  # whole plans, with which steps can be run again


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """What a step that deferred sampling is told."""

    inputs: SamplerInputs
    masks: TokenMasks


class Encoder:
    """Makes the records of one recording, in order; `front` is called before each file's first."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._rows = RowsWriter(redact=origin.redact)
        self._contents = Contents(origin.setup.layout.block_size) if origin.steps else None

    def front(self, number: int) -> list[Record]:
        """What file `number` begins with. It can be read without those before it."""
        origin = self._origin
        self._rows = RowsWriter(redact=origin.redact)
        header = recording_pb2.Header(
            format=FORMAT,
            run=origin.run,
            number=number,
            redacted=origin.redact,
            has_steps=origin.steps,
            unix_s=origin.unix_s,
            clock_s=origin.clock_s,
            setup=encode_setup(origin.setup, redact=origin.redact),
            model=origin.model,
            fingerprint=origin.fingerprint,
            depth=origin.depth,
            options=origin.options,
        )
        records = [Record(header=header)]
        if self._contents is not None:
            records.append(Record(contents=self._contents.encode()))
        return records

    def arrival(self, arrived: Arrived) -> list[Record]:
        if self._contents is not None:
            self._contents.add(arrived)
        return [Record(arrival=encode_arrival(arrived, redact=self._origin.redact))]

    def abort(self, sequence_id: int, now: float, reason: FinishReason) -> list[Record]:
        if self._contents is not None:
            self._contents.forget([sequence_id])
        abort = recording_pb2.Abort(now=now, sequence_id=sequence_id, reason=reason)
        return [Record(abort=abort)]

    def decision(self, output: SchedulerOutput | None, now: float) -> list[Record]:
        return [Record(decision=encode_decision(output, now))]

    def plan(self, plan: StepPlan, submitted_s: float) -> list[Record]:
        records = [Record(plan=self._rows.encode(plan, submitted_s))]
        if self._contents is not None:
            self._contents.run(plan)
            full = recording_pb2.FullPlan(
                step_id=plan.step_id,
                defer_sampling=plan.defer_sampling,
                arrays=encode_arrays(plan),
            )
            records.append(Record(full_plan=full))
        return records

    def late(self, step_id: int, inputs: SamplerInputs, masks: TokenMasks) -> list[Record]:
        arrays = encode_arrays(Late(inputs=inputs, masks=masks))
        return [Record(late_inputs=recording_pb2.LateInputs(step_id=step_id, arrays=arrays))]

    def result(self, result: StepResult, ended: Sequence[int], now: float) -> list[Record]:
        """`ended` are the sequences that it has ended."""
        if self._contents is not None:
            self._contents.take(result.step_id, result.token_ids)
            self._contents.forget(ended)
        message = recording_pb2.Result(
            now=now,
            step_id=result.step_id,
            token_ids=b"" if self._origin.redact else pack(INT32, result.token_ids),
            num_samples=len(result.token_ids),
            fault_rows=pack(INT32, result.faults),
            faults=bytes(result.faults.values()),
            num_scores=len(result.scores),
            bad_scores=pack(INT32, _bad_scores(result)),
            finished=ended,
        )
        if result.execution is not None:
            _put_times(message, result.execution)
        return [Record(result=message)]

    def expiry(self, now: float) -> list[Record]:
        return [Record(expiry=recording_pb2.Expiry(now=now))]

    def restart(self, *, is_outside: bool) -> list[Record]:
        if self._contents is not None:
            self._contents.lose()
        return [Record(restart=recording_pb2.Restart(is_outside=is_outside))]

    def state(self, state: SchedulerState) -> list[Record]:
        """Of a scheduler in which nothing lives; the first after a file's front."""
        return [Record(state=encode_state(state, redact=self._origin.redact))]


def encode_decision(output: SchedulerOutput | None, now: float) -> recording_pb2.Decision:
    if output is None:
        return recording_pb2.Decision(now=now)
    return recording_pb2.Decision(
        now=now,
        step_id=output.step_id,
        removed=output.removed,
        added=[each.sequence_id for each in output.added],
        changed=[
            recording_pb2.TableChange(
                sequence_id=each.sequence_id,
                first_blocks=each.first_blocks,
                appended=[recording_pb2.Blocks(ids=blocks) for blocks in each.appended],
            )
            for each in output.changed
        ],
        copies=np.array(output.copies, "<i4").tobytes(),
    )


def encode_state(state: SchedulerState, *, redact: bool) -> recording_pb2.SchedulerState:
    """Without prefixes where they are to be redacted."""
    return recording_pb2.SchedulerState(
        num_arrivals=state.num_arrivals,
        last_step_id=state.last_step_id,
        updated_at=state.updated_at,
        step_seconds=state.step_seconds,
        last_token_s=state.last_token_s,
        mean_wait_s=state.mean_wait_s,
        is_backed_up=state.is_backed_up,
        removed=state.removed,
        empty_blocks=state.empty_blocks,
        cached_first_blocks=state.cached_first_blocks,
        cached_blocks=state.cached_blocks,
        nodes=[
            recording_pb2.PrefixNode(
                parent=0 if each.parent is None else each.parent + 1,
                salt=each.salt,
                tokens=each.tokens,
                digest=each.digest,
                blocks=[0 if block is None else block + 1 for block in each.blocks],
            )
            for each in (() if redact else state.nodes)
        ],
    )


def _bad_scores(result: StepResult) -> Iterable[int]:
    return (i for i, each in enumerate(result.scores) if math.isnan(each.logprob))


def _put_times(message: recording_pb2.Result, execution: Execution) -> None:
    message.encode_s = execution.encode_s
    message.ranks.extend(
        recording_pb2.RankTimes(
            prepare_s=each.prepare_s, forward_s=each.forward_s, sample_s=each.sample_s
        )
        for each in execution.ranks
    )
