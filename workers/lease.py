"""The time for which a worker's driver has said that it still wants it."""

import threading
from collections.abc import Callable

# Renewals are seconds apart, and leases several of those.
TICK_S = 0.25


class Lease:
    """Calls `on_expired` once it has begun and wasn't renewed for as long as was said.

    Time is counted in ticks of a thread of its own: a process that was stopped, or got no
    processor, can't hear a renewal meanwhile, and doesn't count that against its driver.
    """

    def __init__(self, on_expired: Callable[[], None]) -> None:
        self._on_expired = on_expired
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._num_ticks = 0  # that are left
        self._has_begun = False

    def renew(self, lease_s: float) -> None:
        """Begins the lease, or gives it `lease_s` from now on."""
        with self._lock:
            self._num_ticks = int(lease_s / TICK_S) + 1
            if self._has_begun:
                return
            self._has_begun = True
        threading.Thread(target=self._count, name="lease", daemon=True).start()

    def release(self) -> None:
        """The worker ends anyway: nothing is called any more."""
        self._ended.set()

    def _count(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._lock:
                self._num_ticks -= 1
                if self._num_ticks >= 0:
                    continue
            self._on_expired()
            return
