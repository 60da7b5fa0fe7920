"""How many requests each key, and all together, may have at once, over gRPC and HTTP."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import CapacityError, InvalidRequestError

RETRY_AFTER_S = 1.0


class RequestSlots:
    """None: no limit."""

    def __init__(self, max_per_key: int | None, max_requests: int | None = None) -> None:
        self._max_per_key = max_per_key
        self._max_requests = max_requests
        self._num_taken = 0
        self._taken: Counter[str] = Counter()
        self._none_taken = asyncio.Event()
        self._none_taken.set()

    @property
    def num_taken(self) -> int:
        return self._num_taken

    async def wait_none_taken(self) -> None:
        await self._none_taken.wait()

    @contextmanager
    def take(self, tenant: str) -> Iterator["Slots"]:
        """A slot for the length of the `with` block, which may become more.

        Raises CapacityError: the tenant's slots, or those of all together, are taken; nothing is
        changed.
        """
        slots = Slots(self, tenant)
        slots.grow(1)
        try:
            yield slots
        finally:
            self._give_back(tenant, slots.count)

    def add(self, tenant: str, count: int) -> None:
        """Raises CapacityError, as `take`."""
        taken = self._taken[tenant]
        if self._max_per_key is not None and taken + count > self._max_per_key:
            raise CapacityError(
                f"this key has {taken} requests under way and may have "
                f"max_requests_per_key={self._max_per_key}: send it again once one has ended",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._max_requests is not None and self._num_taken + count > self._max_requests:
            raise CapacityError(
                f"{self._num_taken} requests are under way and max_requests={self._max_requests} "
                "may be: send it again once some have ended",
                retry_after_s=RETRY_AFTER_S,
            )
        self._taken[tenant] += count
        self._num_taken += count
        self._none_taken.clear()

    def check_fits(self, count: int) -> None:
        """Raises InvalidRequestError: one request wants more slots than it may ever have."""
        limits = (
            ("max_requests_per_key", self._max_per_key),
            ("max_requests", self._max_requests),
        )
        for name, most in limits:
            if most is not None and count > most:
                raise InvalidRequestError(
                    f"prompt has {count} entries, each of which counts as a request: must be at "
                    f"most {name}={most}"
                )

    def _give_back(self, tenant: str, count: int) -> None:
        self._taken[tenant] -= count
        self._num_taken -= count
        if not self._taken[tenant]:
            del self._taken[tenant]
        if not self._taken:
            self._none_taken.set()


class Slots:
    """Those of one request. Made by `RequestSlots.take`."""

    def __init__(self, all_slots: RequestSlots, tenant: str) -> None:
        self.count = 0
        self._all = all_slots
        self._tenant = tenant

    def grow(self, count: int) -> None:
        """By so many, or by none.

        Raises CapacityError, as `RequestSlots.take`. Raises InvalidRequestError: there are never
        so many.
        """
        self._all.check_fits(self.count + count)
        self._all.add(self._tenant, count)
        self.count += count
