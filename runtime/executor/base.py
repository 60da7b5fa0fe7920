"""What the engine needs of whatever runs its steps."""

from typing import Protocol

from runtime.scheduling.sampler_inputs import SamplerInputs
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks


class Executor(Protocol):
    """Runs steps in the order they come, several of which may be under way.

    Each call raises WorkerError if a rank died, hung past its deadline or disagreed; no step can
    follow.
    """

    def submit(self, plan: StepPlan) -> None:
        """Hands a step to every rank, and doesn't wait for it."""
        ...

    def sample(self, step_id: int, inputs: SamplerInputs, masks: TokenMasks) -> None:
        """Tells what a step that defers sampling waits for, the oldest such step first.

        A token must be allowed by `masks` as well as by those of `inputs`.
        """
        ...

    def result(self) -> StepResult:
        """Waits for the oldest step that was handed over.

        Its `execution` may say where the time went.
        """
        ...

    def close(self) -> None:
        """Takes no more steps; a `result` that waits raises WorkerError.

        From any thread, also twice and after a WorkerError. The ranks end with their group.
        """
        ...
