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
        """Takes no more steps; a running `execute` raises WorkerError.

        From any thread, also twice and after a WorkerError. The ranks end with their group.
        """
        ...
