"""How long a step may hold the engine's thread to give sequences states of their own."""

import time


class RemakingTime:
    """For all of a step, in seconds of the thread's own CPU time: a busy machine takes no more.

    For one thread. Time passes in a `with` block.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._left_s = limit_s
        self._deadline_s: float | None = None  # in a block

    def renew(self) -> None:
        """A step begins."""
        self._left_s = self._limit_s

    def suffices_for(self, duration_s: float) -> bool:
        left_s = self._left_s
        if self._deadline_s is not None:
            left_s = self._deadline_s - time.thread_time()
        return duration_s <= left_s

    def __enter__(self) -> None:
        self._deadline_s = time.thread_time() + self._left_s

    def __exit__(self, *_: object) -> None:
        assert self._deadline_s is not None
        self._left_s = self._deadline_s - time.thread_time()
        self._deadline_s = None
