"""What is measured, and what it is called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

PROMPT_TOKENS = 32
VOCAB_SIZE = 300
MAX_MODEL_LEN = 16_384
BLOCK_SIZE = 16
MAX_ROWS = 256
STEP_TOKENS = MAX_ROWS * PROMPT_TOKENS
DEPTH = 2  # what is measured where nothing else is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Processes that are started together."""

    tp: int
    depth: int  # most steps in flight
    delay_ms: float  # round trip that is added between driver and workers; 0: no proxy


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """So many rows that decode, on a model that takes so long for each step."""

    step_ms: float
    rows: int

    def name(self, on: Deployment) -> str:
        """The metric's name without its quantity."""
        return (
            f"{self.step_ms:g}ms_{self.rows}rows_{on.delay_ms:g}ms"
            + f"_tp{on.tp}" * (on.tp > 1)
            + f"_depth{on.depth}" * (on.depth != DEPTH)
        )


# Of steps that take 5 ms, by rows and added round trip: idle below so many per cent.
GOAL_STEP_MS = 5.0
GOALS: Mapping[tuple[int, float], float] = MappingProxyType(
    {(64, 0.0): 3.0, (64, 1.0): 6.0, (256, 0.0): 8.0, (256, 0.3): 8.0, (256, 1.0): 8.0}
)


def goal(case: Case, on: Deployment) -> float | None:
    if case.step_ms != GOAL_STEP_MS or on.depth < DEPTH:
        return None
    return GOALS.get((case.rows, on.delay_ms))


def deployments(
    tps: Sequence[int], delays_ms: Sequence[float], depths: Sequence[int]
) -> list[tuple[Deployment, ...]]:
    """Those that differ in depth alone belong together."""
    return [
        tuple(Deployment(tp=tp, depth=depth, delay_ms=delay_ms) for depth in depths)
        for tp in tps
        for delay_ms in delays_ms
    ]
