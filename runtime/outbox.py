"""What waits to be sent to one frontend: the engine never waits for it, so it is bounded here."""

import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from runtime.errors import CapacityError
from runtime.live_requests import Outputs, TokenBatch
from runtime.request import RequestFailure, RequestOutput, TokenLogprobs

# Token ids and log probabilities: about 50 MB, and 20 s of 50,000 tokens a second.
MAX_VALUES = 1 << 20
# What a message takes beside its values, in values.
MESSAGE_VALUES = 16
RETRY_AFTER_S = 1.0

_Item = TypeVar("_Item")


class Outbox(Generic[_Item]):
    """Items in order, for one thread that takes them; others put them, and never wait.

    Where too much waits, all of it is dropped, nothing more is kept, and `on_overflow` is called
    once, on the thread that put too much.
    """

    def __init__(self, *, max_values: int = MAX_VALUES, on_overflow: Callable[[], object]) -> None:
        self._max_values = max_values
        self._on_overflow = on_overflow
        self._items: SimpleQueue[tuple[_Item, int] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_values = 0  # of what waits
        self._error: CapacityError | None = None

    @property
    def has_overflowed(self) -> bool:
        return self._error is not None

    def put(self, item: _Item, num_values: int = 0) -> None:
        num_values += MESSAGE_VALUES
        with self._lock:
            if self._error is not None:
                return
            if self._num_values + num_values <= self._max_values:
                self._num_values += num_values
                self._items.put((item, num_values))
                return
            self._error = CapacityError(
                f"the frontend doesn't read: {self._num_values} values wait for it, and "
                f"{self._max_values} may; connect again and resume its requests",
                retry_after_s=RETRY_AFTER_S,
            )
        self._drop_all()
        self._items.put(None)
        self._on_overflow()

    def take(self) -> _Item:
        """The next item, once there is one. Raises CapacityError: too much has waited."""
        if self._error is not None:
            raise self._error
        entry = self._items.get()
        with self._lock:
            # Also where an item was got: what came before it may have been dropped.
            if self._error is not None:
                raise self._error
            assert entry is not None, "it wakes the reader of an outbox that has overflowed"
            item, num_values = entry
            self._num_values -= num_values
        return item

    def _drop_all(self) -> None:
        while True:
            try:
                self._items.get_nowait()
            except Empty:
                return


def num_values_of(outputs: Outputs) -> int:
    """How much a step brought one client."""
    if isinstance(outputs, TokenBatch):
        return len(outputs)
    return sum(map(_num_values, outputs))


def _num_values(output: RequestOutput | RequestFailure) -> int:
    if isinstance(output, RequestFailure):
        return 1
    count = len(output.token_ids)
    if output.logprobs or output.scores:
        count += _num_logprobs(output.logprobs) + _num_logprobs(output.scores)
    return count


def _num_logprobs(logprobs: Iterable[TokenLogprobs]) -> int:
    return sum(1 + 2 * len(each.top_token_ids) for each in logprobs)
