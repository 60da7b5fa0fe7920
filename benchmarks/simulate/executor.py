"""A worker group that computes nothing and takes the time the cost model says."""

from collections import deque
from collections.abc import Callable

from benchmarks.simulate.cost import CostModel
from runtime.scheduling.sampler_inputs import SamplerInputs
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks

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
        """`on_step(start_s, seconds)` is called for each step when it is handed over."""
        self._cost = cost
        self._clock = clock
        self._on_step = on_step
        self._free_at_s = 0.0
        self._steps: deque[tuple[float, StepResult]] = deque()  # with when they end

    def submit(self, plan: StepPlan) -> None:
        """It runs when those before it are through."""
        num_samples = len(plan.sample_sequence)
        cost = self._cost.step(plan.seq_lens, plan.query_lens, num_samples=num_samples)
        start_s = max(self._clock.now_s, self._free_at_s)
        if self._on_step is not None:
            self._on_step(start_s, cost.total_s)
        self._free_at_s = start_s + cost.total_s
        result = StepResult(
            step_id=plan.step_id,
            sequence_ids=plan.sequence_ids[plan.sample_sequence].tolist(),
            token_ids=[TOKEN] * num_samples,
        )
        self._steps.append((self._free_at_s, result))

    def sample(self, step_id: int, inputs: SamplerInputs, masks: TokenMasks) -> None:
        """No workload asks for what depends on it."""
        raise AssertionError(f"step {step_id} defers sampling")

    def result(self) -> StepResult:
        """Passes the time until it is there."""
        self._clock.now_s, result = self._steps.popleft()
        return result

    def close(self) -> None:
        """Nothing runs."""
