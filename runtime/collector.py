"""Python's garbage collector in a process that serves."""

import gc

# Collections of the middle generation before one of the oldest.
NEVER = 1 << 30
# A sweep of what so many steps leave takes about a millisecond.
SWEEP_STEPS = 16


def calm_collector() -> None:
    """Keeps the garbage collector from walking all that waits while a step is due.

    What start-up made is never walked again, and the oldest generation when the engine is idle
    alone: its objects form no cycles, so nothing piles up there.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)


class Sweep:
    """To be called in each step while the workers run it: collects what is young now and then.

    By itself the collector begins when enough objects were made since, less those that went. Where
    a request comes for each that ends it doesn't, and when it does, it walks what thousands of
    waiting requests have made, in the middle of a step.
    """

    def __init__(self) -> None:
        self._num_steps = 0

    def __call__(self) -> None:
        self._num_steps += 1
        if self._num_steps % SWEEP_STEPS == 0:
            gc.collect(1)
