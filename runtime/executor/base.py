"""What the engine needs of whatever runs its steps."""

from typing import Protocol

from runtime.scheduling.step_plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs steps in the order they come."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step on every rank.

        Raises WorkerError: a rank died, hung past its deadline or disagreed; no step can follow.
        """
        ...

    def close(self) -> None:
        """Ends the ranks. May be called twice, and after a WorkerError."""
        ...
