"""How many requests each key may have at once, over gRPC and HTTP together."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import CapacityError

RETRY_AFTER_S = 1.0


class RequestSlots:
    """`max_per_key` None: no limit."""

    def __init__(self, max_per_key: int | None) -> None:
        self._max_per_key = max_per_key
        self._taken: Counter[str] = Counter()
        self._none_taken = asyncio.Event()
        self._none_taken.set()

    @property
    def num_taken(self) -> int:
        return self._taken.total()

    async def wait_none_taken(self) -> None:
        await self._none_taken.wait()

    @contextmanager
    def take(self, tenant: str) -> Iterator[None]:
        """A slot for the length of the `with` block.

        Raises CapacityError: the tenant has all of its slots taken; nothing is changed.
        """
        if self._max_per_key is not None and self._taken[tenant] >= self._max_per_key:
            raise CapacityError(
                f"this key has {self._taken[tenant]} requests under way and may have "
                f"max_requests_per_key={self._max_per_key}: send it again once one has ended",
                retry_after_s=RETRY_AFTER_S,
            )
        self._taken[tenant] += 1
        self._none_taken.clear()
        try:
            yield
        finally:
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
            if not self._taken:
                self._none_taken.set()
