"""Finds out that a client takes nothing of what waits for it."""

import asyncio


class ReaderWatch:
    """Aborts the connection of a client that takes nothing for `timeout_s` while it is watched."""

    def __init__(
        self, transport: asyncio.Transport, timeout_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self.end()
        waiting = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._timeout_s, self._look, waiting)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, num_bytes: int) -> None:
        if self._transport.get_write_buffer_size() < num_bytes:
            self.begin()
        else:
            self._transport.abort()
