"""Steps that were decided, and whose results haven't come."""

from collections import deque

from runtime.scheduling.output import SchedulerOutput

# The quickest of so many steps tells whether a deadline can be met.
RECENT_STEPS = 32


class StepsInFlight:
    """Oldest first, with the time that each has had the workers for itself."""

    def __init__(self) -> None:
        self.last_step_id = 0
        self.taken_at = 0.0  # the last result
        self.step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._steps: deque[tuple[SchedulerOutput, float]] = deque()  # with when it was decided
        self._surplus_until = 0  # the last step that may have rows of sequences that have ended

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def quickest_s(self) -> float:
        """Of the last steps; 0 where there was none."""
        return min(self.step_seconds, default=0.0)

    @property
    def awaited_step_id(self) -> int | None:
        """The newest step that is out."""
        return self.last_step_id if self._steps else None

    def add(self, output: SchedulerOutput, now: float) -> None:
        self.last_step_id = output.step_id
        self._steps.append((output, now))

    @property
    def oldest(self) -> SchedulerOutput:
        assert self._steps, "no step is in flight"
        return self._steps[0][0]

    def take(self, now: float) -> None:
        """The oldest's result is there."""
        _, added_at = self._steps.popleft()
        self.step_seconds.append(now - max(added_at, self.taken_at))
        self.taken_at = now

    def note_end(self) -> None:
        """A sequence has ended: the steps that are out may still have rows of it."""
        if self._steps:
            self._surplus_until = self.last_step_id

    def may_have_ended(self, output: SchedulerOutput) -> bool:
        """Whether a step may have rows of sequences that ended after it was decided."""
        return output.step_id <= self._surplus_until

    def clear(self) -> list[SchedulerOutput]:
        """Forgets all, which is what it returns; steps count from 1 again."""
        outputs = [output for output, _ in self._steps]
        self._steps.clear()
        self.last_step_id = self._surplus_until = 0
        return outputs
