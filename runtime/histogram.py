"""How often values fell where, at a cost that every step can bear."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# Those of vLLM, for dashboards that compare, and finer ones below where tiny models end up.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# A part of a step takes microseconds, a step of a large prompt on a CPU a minute.
STEP_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0),
)
NUM_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram at one moment."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # one for each bound, and one for the values above the last
    sum: float  # of all values

    def __post_init__(self) -> None:
        """Raises ValueError: there isn't one count more than bounds."""
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError(
                f"counts has {len(self.counts)} values, bounds has {len(self.bounds)}: "
                "must be one more"
            )

    @property
    def count(self) -> int:
        """Of all values."""
        return sum(self.counts)


class Histogram:
    """Counts values by the first of its bounds that they don't exceed.

    Changed on one thread and read on any: a snapshot's sum may be one value apart from its counts.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        """Raises ValueError: `bounds` don't ascend."""
        self.bounds = tuple(bounds)
        if any(low >= high for low, high in pairwise(self.bounds)):
            raise ValueError(f"bounds {self.bounds} must ascend")
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts `value` so many times."""
        self._counts[bisect_left(self.bounds, value)] += count
        self._sum += value * count

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self.bounds, tuple(self._counts), self._sum)
