"""Calls that threads leave for one thread, which runs them in order."""

from collections.abc import Callable
from queue import Empty, SimpleQueue

Call = Callable[[], None]


class Mailbox:
    """Its owner is the thread that runs the calls, until it closes the mailbox."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._is_closed = False

    def post(self, call: Call) -> None:
        """Leaves a call; on any thread. Once the mailbox is closed, the call is run at once."""
        self._calls.put(call)
        if self._is_closed:
            self.run_all()

    def run_all(self) -> None:
        """Runs what is there."""
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            call()

    def run_next(self, timeout_s: float | None = None) -> bool:
        """Waits for a call and runs it; False if none came within `timeout_s`."""
        try:
            call = self._calls.get(timeout=timeout_s)
        except Empty:
            return False
        call()
        return True

    def close(self) -> None:
        """Its owner leaves, after running what is there."""
        self._is_closed = True
        self.run_all()
