"""How long a step may take before a rank counts as hung."""

from collections import deque

from runtime.scheduling.step_plan import StepPlan

# Of what a step took that had as much to do; and never less than this.
FACTOR = 10.0
FLOOR_S = 10.0
FIRST_GRACE = 3.0
# So many of the latest steps of about the same size are remembered.
NUM_KEPT = 32
# Pairs of tokens that attend to each other, in as much time as a token takes in the other layers:
# an order of magnitude is enough.
PAIRS_PER_TOKEN = 256


class StepDeadlines:
    """Learns from the steps of all epochs, and says how long another may take.

    A step gets FACTOR times as long as the slowest lately that had as much to do or more, and the
    ceiling where there was none: the first long prompt isn't taken for a hang. The first step
    of an epoch, in which workers allocate and compile, gets three times that.
    """

    def __init__(self, ceiling_s: float) -> None:
        self._ceiling_s = ceiling_s
        self._seconds: dict[int, deque[float]] = {}  # by size, a power of two

    def deadline_s(self, size: int, *, is_first: bool) -> float:
        slowest = max(
            (max(each) for other, each in self._seconds.items() if other >= size), default=None
        )
        if slowest is None:
            return self._ceiling_s
        grace = FIRST_GRACE if is_first else 1.0
        return min(self._ceiling_s, grace * max(FLOOR_S, FACTOR * slowest))

    def learn(self, size: int, seconds: float) -> None:
        """A step of this size took so long, without waiting for those before it."""
        self._seconds.setdefault(size, deque(maxlen=NUM_KEPT)).append(seconds)


def size_of(plan: StepPlan) -> int:
    """Of a step's work, as a power of two."""
    queries, lengths = plan.query_lens.astype("int64"), plan.seq_lens.astype("int64")
    num_pairs = int((queries * (lengths + queries)).sum())
    return (len(plan.input_ids) + num_pairs // PAIRS_PER_TOKEN).bit_length()
