"""Python's garbage collector in a process that serves."""

import gc

# Collections of the middle generation before one of the oldest.
NEVER = 1 << 30


def calm_collector() -> None:
    """Keeps the garbage collector from walking all that waits while a step is due.

    What start-up made is never walked again, and the oldest generation when the engine is idle
    alone: its objects form no cycles, so nothing piles up there.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
