"""A scheduler and an executor that tell what they are asked and what they answer."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from runtime.executor.base import Executor
from runtime.recording.arrivals import Arrived
from runtime.recording.encoder import Encoder, Origin
from runtime.recording.setup import SchedulerParts
from runtime.recording.writer import RecordWriter
from runtime.request import FinishReason
from runtime.scheduling.output import SchedulerOutput, StepOutcome
from runtime.scheduling.sampler_inputs import SamplerInputs
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.snapshot import take_state
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks


class Recorder:
    """Writes down what happens, in order. For one thread, the engine's; it is never held up."""

    def __init__(
        self,
        folder: Path,
        origin: Origin,
        *,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is the engine's. Raises OSError: the folder can't be written."""
        self._encoder = Encoder(origin)
        self._keeps_steps = origin.steps
        self._clock = clock
        self._writer = RecordWriter(
            folder, origin.run, max_bytes=max_bytes, front=self._encoder.front
        )

    def close(self) -> None:
        """Writes what is waiting. On any thread, once nothing comes any more."""
        self._writer.close()

    def queued(self, sequence: Sequence, now: float) -> None:
        arrived = Arrived.of(sequence, now)
        num_bytes = arrived.token_ids.itemsize * len(arrived.token_ids)
        self._writer.put(partial(self._encoder.arrival, arrived), num_bytes=num_bytes)

    def aborted(self, sequence_id: int, now: float, reason: FinishReason) -> None:
        self._writer.put(partial(self._encoder.abort, sequence_id, now, reason))

    def decided(self, output: SchedulerOutput | None, now: float) -> None:
        self._writer.put(partial(self._encoder.decision, output, now))

    def submitted(self, plan: StepPlan) -> None:
        num_bytes = 4 * plan.input_ids.nbytes
        if self._keeps_steps:  # tables are gathered while they are as they were
            plan = replace(plan, block_tables=tuple(plan.block_tables))
            num_bytes += sum(each.block_ids.nbytes for each in plan.block_tables)
        self._writer.put(partial(self._encoder.plan, plan, self._clock()), num_bytes=num_bytes)

    def told(self, step_id: int, inputs: SamplerInputs, masks: TokenMasks) -> None:
        if self._keeps_steps:
            make = partial(self._encoder.late, step_id, inputs, masks)
            self._writer.put(make, num_bytes=masks.words.nbytes)

    def updated(self, result: StepResult, outcome: StepOutcome, now: float) -> None:
        failed = (sequence for sequence, _ in outcome.failed)
        ended = [each.sequence_id for each in (*outcome.finished, *failed)]
        self._writer.put(partial(self._encoder.result, result, ended, now))

    def restarted(self, *, is_outside: bool) -> None:
        self._writer.put(partial(self._encoder.restart, is_outside=is_outside))

    def expired(self, now: float) -> None:
        self._writer.put(partial(self._encoder.expiry, now))

    def idle(self, scheduler: Scheduler) -> None:
        """Nothing lives: a good moment to begin a file, which can be replayed by itself."""
        if self._writer.wants_new_file and not scheduler.has_work:
            make = partial(self._encoder.state, take_state(scheduler))
            self._writer.put(make, begins_file=True)


class RecordedScheduler(Scheduler):
    """Tells a recorder of every call that changes it."""

    def __init__(self, parts: SchedulerParts, recorder: Recorder) -> None:
        super().__init__(
            parts.cache,
            policy=parts.policy,
            limits=parts.limits,
            eos_token_ids=parts.eos_token_ids,
        )
        self._recorder = recorder

    def add(self, sequence: Sequence, now: float = 0.0) -> None:
        self._recorder.queued(sequence, now)  # first: one that is refused loses its forks
        super().add(sequence, now)

    def abort(
        self,
        sequence_id: int,
        now: float = 0.0,
        *,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        self._recorder.aborted(sequence_id, now, reason)
        super().abort(sequence_id, now, reason=reason)

    def schedule(self, now: float = 0.0) -> SchedulerOutput | None:
        output = super().schedule(now)
        self._recorder.decided(output, now)
        return output

    def update(self, result: StepResult, now: float = 0.0) -> StepOutcome:
        outcome = super().update(result, now)
        self._recorder.updated(result, outcome, now)
        return outcome

    def expire(self, now: float) -> None:
        self._recorder.expired(now)
        super().expire(now)

    def restart(self, *, is_outside: bool = True) -> None:
        self._recorder.restarted(is_outside=is_outside)
        super().restart(is_outside=is_outside)


class RecordedExecutor:
    """Tells a recorder of what it hands over."""

    def __init__(self, executor: Executor, recorder: Recorder) -> None:
        self._executor = executor
        self._recorder = recorder

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(plan)
        self._recorder.submitted(plan)

    def sample(self, step_id: int, inputs: SamplerInputs, masks: TokenMasks) -> None:
        self._executor.sample(step_id, inputs, masks)
        self._recorder.told(step_id, inputs, masks)

    def result(self) -> StepResult:
        return self._executor.result()

    def close(self) -> None:
        self._executor.close()
