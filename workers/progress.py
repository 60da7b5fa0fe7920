"""How often the driver hears of a load."""

import time
from collections.abc import Callable

from workers.model_side import Progress

INTERVAL_S = 0.1


def throttled(send: Callable[[tuple[int, int]], None]) -> Progress:
    """Sends bytes loaded and to load at most every INTERVAL_S, and the last."""
    last = float("-inf")

    def on_progress(loaded_bytes: int, total_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        if loaded_bytes < total_bytes and now - last < INTERVAL_S:
            return
        last = now
        send((loaded_bytes, total_bytes))

    return on_progress
