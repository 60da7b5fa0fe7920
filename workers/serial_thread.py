"""A thread for what must all happen on one."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class SerialThread:
    """Runs tasks one after another, in the order they were handed over.

    A worker has one for the device: torch keeps the current device and its thread settings per
    thread, and collectives must be called in one order, so everything on the device,
    torch.distributed included, happens there.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # A daemon: a collective whose peer is gone may never return, and must not keep the
        # process alive.
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """What `task` returns or raises comes with the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(run)
        return future

    def run(self, task: Callable[[], T]) -> T:
        """Waits for the task; raises what it raises."""
        return self.submit(task).result()

    def _loop(self) -> None:
        while True:
            self._tasks.get()()
