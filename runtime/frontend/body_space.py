"""How much of requests' bodies a frontend holds at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import CapacityError

RETRY_AFTER_S = 1.0


class BodySpace:
    """For one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Taken now."""
        return self._num_bytes

    @contextmanager
    def share(self) -> Iterator["Share"]:
        """One request's, given back after the `with` block."""
        share = Share(self)
        try:
            yield share
        finally:
            self._num_bytes -= share.num_bytes

    def take(self, num_bytes: int) -> None:
        """Raises CapacityError: there is less left; nothing is changed."""
        if self._num_bytes + num_bytes > self._max_bytes:
            raise CapacityError(
                f"the bodies of all requests are longer than max_buffered_bytes={self._max_bytes}:"
                " send this one again once others have ended",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_bytes += num_bytes


class Share:
    """What one request has taken. Made by `BodySpace.share`."""

    def __init__(self, space: BodySpace) -> None:
        self.num_bytes = 0
        self._space = space

    def grow(self, num_bytes: int) -> None:
        """By so much. Raises CapacityError, as `BodySpace.take`."""
        self._space.take(num_bytes)
        self.num_bytes += num_bytes
