"""The public gRPC port: passes clients that may speak gRPC on to its server, and tells others.

gRPC's server can't be given connections, and answers HTTP/1 with bytes that its clients can't read.
So it listens at a Unix socket, and here bytes are copied from and to it, whatever they are.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from runtime.errors import ConfigError
from runtime.frontend.first_bytes import Speech, tell
from runtime.frontend.http_limits import BAD_REQUEST
from runtime.frontend.http_refusal import JSON, LINGER_S, Refusals
from runtime.frontend.public_socket import BACKLOG, listen
from runtime.frontend.reader_watch import ReaderWatch

logger = logging.getLogger(__name__)

# Of a connection, each way: while so much waits to be written, nothing more is read.
MAX_WAITING_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLimits:
    """`max_connections` of all together, the others of each."""

    max_connections: int
    read_timeout_s: float  # until it is clear what a client speaks
    write_timeout_s: float


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new one that no other user can look into. Raises ConfigError: none can be made."""
    try:
        folder = TemporaryDirectory(prefix="lockstep-grpc-")
    except OSError as error:
        raise ConfigError(
            f"no folder can be made for the socket of the gRPC server ({error.strerror}): set "
            "TMPDIR to a folder where files can be made"
        ) from error
    with folder:
        yield Path(folder.name)


class GrpcPort:
    """Listens at `bound` after `start`, and passes on to the gRPC server at `path`."""

    def __init__(
        self,
        bound: socket.socket,
        path: Path,
        limits: PortLimits,
        refusals: Refusals,
        *,
        told: str,
    ) -> None:
        """`told` is what clients of HTTP hear; `bound` is closed by `close`."""
        self.limits = limits
        self._bound = bound
        self._path = str(path)
        self._refusals = refusals
        self._told = told
        self._clients: set[_Client] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._server: asyncio.Server | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Raises ConfigError: another process listens at the port since it was bound."""
        listen(self._bound, option="--port")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Client(self, loop), sock=self._bound, backlog=BACKLOG
        )

    def close(self) -> None:
        """Takes no more connections, and ends those that haven't been passed on."""
        self._is_closed = True
        if self._server is not None:
            self._server.close()
        self._bound.close()
        for client in tuple(self._clients):
            client.end_if_new()

    async def finish(self, grace_s: float) -> None:
        """After `close`: waits until all connections have ended, and cuts what is left."""
        try:
            async with asyncio.timeout(grace_s):
                await self._none_left.wait()
        except TimeoutError:
            logger.info("cuts %d connections of the gRPC port", len(self._clients))
            for client in tuple(self._clients):
                client.transport.abort()
            await self._none_left.wait()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def take(self, client: "_Client") -> bool:
        """Whether a new connection may stay; `leave` is called for each."""
        self._clients.add(client)
        self._none_left.clear()
        if self._is_closed:
            return False
        if len(self._clients) > self.limits.max_connections:
            self._refusals.count(429)
            return False
        return True

    def leave(self, client: "_Client") -> None:
        self._clients.remove(client)
        if not self._clients:
            self._none_left.set()

    def connect(self, client: "_Client") -> asyncio.Task[None]:
        """Opens the other end of a client's connection, and ends that where it can't."""
        task = asyncio.create_task(self._connect(client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    def refusal(self) -> bytes:
        """What clients of HTTP get, to be sent now."""
        content = self._refusals.content_of(BAD_REQUEST, self._told)
        head = (
            f"HTTP/1.1 {BAD_REQUEST.status} Bad Request\r\ncontent-type: {JSON}\r\n"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + content

    async def _connect(self, client: "_Client") -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: _ServerSide(client), self._path)
        except OSError as error:
            logger.warning("a connection can't be passed on to the gRPC server: %s", error)
            client.transport.abort()


class _Client(asyncio.Protocol):
    """A connection from its acceptance to its end."""

    def __init__(self, port: GrpcPort, loop: asyncio.AbstractEventLoop) -> None:
        self._port = port
        self._loop = loop
        self._head = b""
        self._read: Callable[[bytes], object] = self._read_head
        self._is_new = True
        self._is_read_out = False
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._server: asyncio.Transport | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.set_write_buffer_limits(high=MAX_WAITING_BYTES)
        limits = self._port.limits
        self._reader_watch = ReaderWatch(transport, limits.write_timeout_s, self._loop)
        if not self._port.take(self):
            transport.abort()
            return
        self._set_timer(limits.read_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.leave(self)
        self._stop_timer()
        self._reader_watch.end()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._server is not None:
            self._server.abort()
            self._server = None
        self._read = _drop

    def data_received(self, data: bytes) -> None:
        self._read(data)

    def eof_received(self) -> bool:
        """Returns whether the connection stays open."""
        self._is_read_out = True
        if self._server is None:
            return False
        self._server.write_eof()
        return True

    def pause_writing(self) -> None:
        self._reader_watch.begin()
        if self._server is not None:
            self._server.pause_reading()

    def resume_writing(self) -> None:
        self._reader_watch.end()
        if self._server is not None:
            self._server.resume_reading()

    def pass_on(self, server: asyncio.Transport) -> None:
        """What comes from now on is the gRPC server's, which gets what has come before."""
        if self.transport.is_closing():
            server.abort()
            return
        self._server = server
        self._is_new = False
        self._read = server.write
        server.write(self._head)
        self._head = b""
        self.transport.resume_reading()

    def end(self) -> None:
        """The gRPC server has closed its side, and sends nothing more."""
        self._server = None
        self._end_within(self._port.limits.write_timeout_s)

    def end_if_new(self) -> None:
        """Unless it has been passed on, or answered."""
        if self._is_new:
            self.transport.abort()

    def _read_head(self, data: bytes) -> None:
        self._head += data
        match tell(self._head):
            case None:
                return
            case Speech.HTTP2 | Speech.TLS:
                self._stop_timer()
                self.transport.pause_reading()
                self._connecting = self._port.connect(self)
            case Speech.HTTP1:
                self.transport.write(self._port.refusal())
                self._end_within(LINGER_S)
            case Speech.UNKNOWN:
                self.transport.abort()

    def _end_within(self, timeout_s: float) -> None:
        """Lets the client take what waits for it, and close; what it still sends is dropped."""
        self._is_new = False
        self._set_timer(timeout_s)
        if self._is_read_out:
            self.transport.close()
            return
        self._read = _drop
        self.transport.resume_reading()
        self.transport.write_eof()

    def _set_timer(self, timeout_s: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(timeout_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _ServerSide(asyncio.Protocol):
    """The other end of a client's connection."""

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._write = client.transport.write

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=MAX_WAITING_BYTES)
        self._client.pass_on(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._client.transport.is_closing():
            self._client.end()

    def data_received(self, data: bytes) -> None:
        self._write(data)

    def pause_writing(self) -> None:
        self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        self._client.transport.resume_reading()


def _drop(data: bytes) -> None:
    """Of a connection that only waits for its end."""
