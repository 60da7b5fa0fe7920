"""The steps in flight: handed to the workers ahead of time, taken back in their order."""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from runtime.executor.base import Executor
from runtime.scheduling.flatten import BatchTable
from runtime.scheduling.output import SchedulerOutput, StepOutcome
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.step_plan import Execution, StepPlan
from runtime.structured import StructuredSequences


class _Step(NamedTuple):
    """A step in flight; times are of the engine's clock."""

    output: SchedulerOutput
    plan: StepPlan
    started: float
    flattened: float


class FinishedStep(NamedTuple):
    """A step whose result was applied; times are of the engine's clock."""

    output: SchedulerOutput
    outcome: StepOutcome
    execution: Execution | None
    started: float
    flattened: float
    executed: float


class StepPipeline:
    """Keeps up to `depth` steps with the workers. For one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        structured: StructuredSequences,
        *,
        vocab_size: int,
        depth: int,
        clock: Callable[[], float],
    ) -> None:
        self.depth = depth
        self._scheduler = scheduler
        self._executor = executor
        self._structured = structured
        self._clock = clock
        self._table = BatchTable(
            max_num_seqs=scheduler.limits.max_num_seqs,
            num_groups=len(scheduler.cache.layout.groups),
            vocab_size=vocab_size,
        )
        self._in_flight: deque[_Step] = deque()  # oldest first

    def restart(self, executor: Executor) -> None:
        """Other workers run the steps from now on; those in flight are forgotten."""
        self._executor = executor
        self._in_flight.clear()

    def fill(self) -> None:
        """Hands over steps until `depth` are in flight, or there is nothing to run."""
        while len(self._in_flight) < self.depth:
            output = self._scheduler.schedule(started := self._clock())
            if output is None:
                return
            plan = self._table.flatten(output)
            flattened = self._clock()
            self._executor.submit(plan)
            self._in_flight.append(_Step(output, plan, started, flattened))
            if len(self._in_flight) == 1:
                self._sample_oldest()

    def finish(self) -> FinishedStep | None:
        """Waits for the oldest step and applies what it brought; None if none is in flight."""
        if not self._in_flight:
            return None
        step = self._in_flight.popleft()
        result = self._executor.result()
        executed = self._clock()
        outcome = self._scheduler.update(result, executed)
        self._structured.advance(outcome)
        self._sample_oldest()  # before all else: the workers may wait for it
        return FinishedStep(
            step.output, outcome, result.execution, step.started, step.flattened, executed
        )

    def _sample_oldest(self) -> None:
        """All that the oldest step in flight feeds is known: one that waits for it can sample."""
        for step in islice(self._in_flight, 1):
            if step.plan.late_inputs is not None:
                inputs = step.plan.late_inputs.gather()
                masks = self._structured.make_masks(step.plan)
                self._executor.sample(step.plan.step_id, inputs, masks)
