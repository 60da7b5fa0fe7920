"""What the engine needs of whatever runs its steps."""

from collections.abc import Callable
from typing import Protocol

from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks, no_masks


class Executor(Protocol):
    """Runs steps in the order they come."""

    def execute(
        self, plan: StepPlan, make_masks: Callable[[], TokenMasks] = no_masks
    ) -> StepResult:
        """Runs one step on every rank.

        Where the plan defers sampling, `make_masks` is called while the forward pass runs. The
        result's `execution` may say where the time went.

        Raises WorkerError: a rank died, hung past its deadline or disagreed; no step can follow.
        """
        ...

    def close(self) -> None:
        """Takes no more steps; a running `execute` raises WorkerError.

        From any thread, also twice and after a WorkerError. The ranks end with their group.
        """
        ...
