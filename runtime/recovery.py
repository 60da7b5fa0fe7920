"""What an engine does about its workers' end: new ones, again and again, and when it gives up."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from runtime.errors import LockstepError, WorkerError
from runtime.executor.base import Executor

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 1.0
MAX_DELAY_S = 30.0

OnLost = Callable[[WorkerError], None]


class NewEpoch(NamedTuple):
    """Workers that hold nothing yet."""

    executor: Executor
    # Calls its argument, once and on any thread, when they are lost, also while no step runs.
    on_lost: Callable[[OnLost], None]


class Workforce(NamedTuple):
    """Whoever starts workers for an engine."""

    # The cause behind what was noticed; takes a second at most.
    find_cause: Callable[[WorkerError], WorkerError]
    # Ends the epoch and starts the next. Raises LockstepError: there are no workers.
    restart: Callable[[], NewEpoch]


class Recovery:
    """Starts epochs on threads of its own, one at a time. For one thread but for `stop`."""

    def __init__(self, workforce: Workforce, *, max_restarts: int) -> None:
        self._workforce = workforce
        self._max_restarts = max_restarts
        self._num_fruitless = 0  # epochs in a row that brought nothing, or never began
        self._stopped = threading.Event()

    def run(
        self,
        error: WorkerError,
        *,
        post: Callable[[Callable[[], None]], None],
        wait: Callable[[], None],
        give_up: Callable[[LockstepError], None],
    ) -> tuple[NewEpoch, WorkerError]:
        """Starts epochs until one is there; returns it, and the cause behind `error`.

        Calls `wait`, whose end a call that is left by `post` brings about, as long as it takes, and
        `give_up` with the reason each time that one was too many.
        """
        cause = self._workforce.find_cause(error)
        reason: LockstepError = cause
        while True:
            if self._num_fruitless >= self._max_restarts:
                give_up(reason)
            epoch = self._begin(lambda: post(_wake))
            while not epoch.done():
                wait()
            try:
                return epoch.result(), cause
            except LockstepError as failure:
                logger.error("the workers can't be started: %s", failure)
                reason = failure

    def succeed(self) -> None:
        """A step of the epoch is through."""
        self._num_fruitless = 0

    def stop(self) -> None:
        """No epoch begins any more; on any thread."""
        self._stopped.set()

    def _begin(self, on_done: Callable[[], None]) -> "Future[NewEpoch]":
        """After a while that grows; `on_done` is called on any thread."""
        delay_s = 0.0
        if self._num_fruitless:
            delay_s = min(FIRST_DELAY_S * 2 ** (self._num_fruitless - 1), MAX_DELAY_S)
            logger.info("the workers are started again in %g s", delay_s)
        self._num_fruitless += 1
        epoch: Future[NewEpoch] = Future()
        epoch.add_done_callback(lambda _: on_done())
        threading.Thread(
            target=self._start, args=(epoch, delay_s), name="recovery", daemon=True
        ).start()
        return epoch

    def _start(self, epoch: "Future[NewEpoch]", delay_s: float) -> None:
        try:
            if self._stopped.wait(delay_s):
                raise WorkerError("the engine is stopping")
            epoch.set_result(self._workforce.restart())
        except BaseException as error:  # its owner's, whatever it is
            epoch.set_exception(error)


def _wake() -> None:
    """For a thread that waits for its mailbox."""
