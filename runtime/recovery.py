"""What an engine does about its workers' end: new ones, again and again, and when it gives up."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from runtime.errors import WorkerError
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
        self.find_cause = workforce.find_cause
        self._restart = workforce.restart
        self._max_restarts = max_restarts
        self._num_fruitless = 0  # epochs in a row that brought nothing, or never began
        self._stopped = threading.Event()

    @property
    def is_hopeless(self) -> bool:
        """Whether the next one would be one too many."""
        return self._num_fruitless >= self._max_restarts

    def begin(self, on_done: Callable[[], None]) -> "Future[NewEpoch]":
        """Starts the next epoch, after a while that grows; `on_done` is called on any thread."""
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

    def succeed(self) -> None:
        """A step of the epoch is through."""
        self._num_fruitless = 0

    def stop(self) -> None:
        """No epoch begins any more; on any thread."""
        self._stopped.set()

    def _start(self, epoch: "Future[NewEpoch]", delay_s: float) -> None:
        try:
            if self._stopped.wait(delay_s):
                raise WorkerError("the engine is stopping")
            epoch.set_result(self._restart())
        except BaseException as error:  # its owner's, whatever it is
            epoch.set_exception(error)
