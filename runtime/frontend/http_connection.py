"""One connection to the HTTP port: what its client may take its time for, and for how long."""

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from runtime.errors import CapacityError
from runtime.frontend.http_limits import head_too_long, kind_of_status
from runtime.frontend.http_refusal import JSON, LINGER_S, NO_HEADERS, Refusals
from runtime.frontend.openai.errors import STATUSES, Kind, headers_of, kind_of
from runtime.frontend.reader_watch import ReaderWatch

# So many connections beyond those that may be are told so; more are cut off.
MAX_TOLD = 256
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Of each connection."""

    max_header_bytes: int
    read_timeout_s: float
    write_timeout_s: float


class Connections(ServerState):
    """Those of one server."""

    def __init__(self, max_connections: int | None = None) -> None:
        """None: no limit."""
        super().__init__()
        self.max_connections = max_connections
        self._is_closed = False
        self._none_left = asyncio.Event()
        self._none_left.set()

    @property
    def is_closed(self) -> bool:
        """No further ones are taken."""
        return self._is_closed

    @property
    def num_surplus(self) -> int:
        """How many there are beyond those that may be."""
        if self.max_connections is None:
            return 0
        return max(0, len(self.connections) - self.max_connections)

    def close(self) -> None:
        """Ends those that are idle now, and the others after their answer."""
        self._is_closed = True
        for connection in tuple(self.connections):
            connection.shutdown()

    def cut(self) -> None:
        """Ends all of them now."""
        for connection in tuple(self.connections):
            connection.transport.abort()

    async def wait_none_left(self) -> None:
        await self._none_left.wait()

    def look(self) -> None:
        """Called when one has come or gone."""
        if self.connections:
            self._none_left.clear()
        else:
            self._none_left.set()


class Connection(H11Protocol):
    """uvicorn's, which waits for no client for long."""

    def __init__(
        self,
        config: Config,
        connections: Connections,
        limits: ConnectionLimits,
        refusals: Refusals,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, connections, {}, loop)
        self._all = connections
        self._limits = limits
        self._refusals = refusals
        self._read_timer: asyncio.TimerHandle | None = None
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # What its system doesn't take at once is waited for: what a slow reader holds here is
        # one message, not the output of its whole request.
        transport.set_write_buffer_limits(high=1, low=0)
        super().connection_made(transport)
        timeout_s = self._limits.write_timeout_s
        self._reader_watch = ReaderWatch(transport, timeout_s, self.loop)
        self._all.look()
        if self._all.is_closed:
            transport.abort()
        elif self._all.num_surplus > MAX_TOLD:
            self._refusals.count(429)
            transport.abort()
        elif self._all.num_surplus:
            self._refuse_surplus()
        else:
            self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        _stop(self._read_timer)
        self._reader_watch.end()
        self._all.look()

    def data_received(self, data: bytes) -> None:
        if not self._is_refused:
            super().data_received(data)
        if not self._is_refused:
            self._time_head()

    def shutdown(self) -> None:
        """Ends the connection as soon as no request runs on it."""
        if self._is_refused:
            self.transport.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Called where the client's bytes are no HTTP/1.1, while h11's error is handled."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            message = head_too_long(self._limits.max_header_bytes)
        else:
            # Also where h11 would say 501, which clients take for ours and try again.
            status = 400
            message = f"this is no HTTP/1.1 request: {error}"
        self._refuse(kind_of_status(status)._replace(status=status), message)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_watch.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader_watch.end()

    def _time_head(self) -> None:
        """A head has so long from its first byte on, and on a new connection from the start."""
        is_due = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if not is_due:
            _stop(self._read_timer)
            self._read_timer = None
        elif self._read_timer is None:
            self._read_timer = self.loop.call_later(self._limits.read_timeout_s, self._refuse_slow)

    def _refuse_slow(self) -> None:
        received, _ = self.conn.trailing_data
        if not received:
            self.transport.close()
            return
        self._refuse(
            STATUSES[408],
            f"the head of the request didn't arrive within {self._limits.read_timeout_s:g} s",
        )

    def _refuse_surplus(self) -> None:
        error = CapacityError(
            f"max_connections={self._all.max_connections} are open: try again once some have ended",
            retry_after_s=RETRY_AFTER_S,
        )
        self._refuse(kind_of(error), str(error), headers_of(error))

    def _refuse(self, kind: Kind, message: str, more: Mapping[str, str] = NO_HEADERS) -> None:
        """Answers instead of the app, and ends the connection."""
        self._is_refused = True
        _stop(self._read_timer)
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # it has been answered already
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        content = self._refusals.content_of(kind, message)
        headers = [("content-type", JSON), ("content-length", str(len(content)))]
        response = h11.Response(
            status_code=kind.status,
            headers=[*headers, ("connection", "close"), *more.items()],
            reason=STATUS_PHRASES[kind.status],
        )
        for event in (response, h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._read_timer = self.loop.call_later(LINGER_S, self.transport.close)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
