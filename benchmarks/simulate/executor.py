"""A worker group that computes nothing and takes the time the cost model says."""

from collections.abc import Callable

from benchmarks.simulate.cost import CostModel
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks, no_masks

TOKEN = 1


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SimulatedExecutor:
    """Every sampled token is TOKEN: no answer depends on what the model would say."""

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        *,
        on_step: Callable[[float, float], None] | None = None,
    ) -> None:
        """`on_step(start_s, seconds)` is called within each step."""
        self._cost = cost
        self._clock = clock
        self._on_step = on_step

    def execute(
        self, plan: StepPlan, make_masks: Callable[[], TokenMasks] = no_masks
    ) -> StepResult:
        num_samples = len(plan.sample_sequence)
        cost = self._cost.step(plan.seq_lens, plan.query_lens, num_samples=num_samples)
        if self._on_step is not None:
            self._on_step(self._clock.now_s, cost.total_s)
        self._clock.now_s += cost.total_s
        return StepResult(
            step_id=plan.step_id,
            sequence_ids=plan.sequence_ids[plan.sample_sequence].tolist(),
            token_ids=[TOKEN] * num_samples,
        )

    def close(self) -> None:
        """Nothing runs."""
