"""One client of an engine."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from runtime.live_requests import Sink
from runtime.request import Request


class ServingEngine(Protocol):
    """What a connection needs of its engine; all but `submit` happens on the engine's thread."""

    clock: Callable[[], float]

    def submit(self, call: Callable[[], None]) -> None: ...

    def add(self, connection: "Connection", request: Request, *, arrived_s: float) -> None: ...

    def abort(
        self, connection: "Connection", request_id: int, choice: int | None = None
    ) -> None: ...

    def abort_all(self, connection: "Connection") -> None: ...


class Connection:
    """One client of the engine, with request ids of its own. Its methods never block."""

    def __init__(self, engine: ServingEngine, sink: Sink) -> None:
        self.sink = sink
        self.is_closed = False  # the engine's thread knows
        self._engine = engine

    def add(self, request: Request) -> None:
        """Queues a request. Refusals come through the sink."""
        arrived_s = self._engine.clock()
        self._engine.submit(partial(self._engine.add, self, request, arrived_s=arrived_s))

    def abort(self, request_id: int, choice: int | None = None) -> None:
        """Ends a request or a choice of it, which delivers nothing afterwards.

        What is unknown or has ended is ignored.
        """
        self._engine.submit(partial(self._engine.abort, self, request_id, choice))

    def close(self) -> None:
        """Ends all requests of this connection."""
        self._engine.submit(partial(self._engine.abort_all, self))
