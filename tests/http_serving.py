"""An HTTP server around an app that the test can look into, and clients that misbehave."""

import asyncio
import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import uvloop
from starlette.types import Receive, Scope, Send

from protos.auth import KeyRing
from runtime.frontend.http_server import HttpServer
from runtime.frontend.public_socket import bind
from runtime.frontend_config import FrontendConfig

TIMEOUT_S = 30
HOST = "127.0.0.1"
OPTION = "--http-port"
KEY = "http-key"
TENANT = "acme"
GRPC_PORT = 50051
EXEMPT = ("/health", "/", "/static/")
CHUNK = b"x" * (16 << 10)
MAX_BODY_BYTES = 64 << 10
MAX_HEADER_BYTES = 4 << 10


class App:
    """Says what it was asked; what becomes of its work can be waited for."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[str] = SimpleQueue()
        self.ended: SimpleQueue[str] = SimpleQueue()
        self.sent_bytes = 0
        self._released: SimpleQueue[asyncio.Event] = SimpleQueue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.put(scope["path"])
        try:
            await self._serve(scope, receive, send)
        except asyncio.CancelledError:
            self.ended.put("cancelled")
            raise
        self.ended.put("done")

    def wait_begun(self, path: str) -> None:
        """Until a request for `path` has come."""
        while self.begun.get(timeout=TIMEOUT_S) != path:
            pass

    def wait_ended(self, how: str) -> None:
        """Until one has ended so."""
        while self.ended.get(timeout=TIMEOUT_S) != how:
            pass

    def release(self, server: "RunningHttp") -> None:
        """Lets what waits go on."""
        server.call_soon(self._released.get(timeout=TIMEOUT_S).set)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        match scope["path"]:
            case "/flood":
                await self._flood(send)
            case "/hold":
                await self._wait()
                await answer(send, {"held": True})
            case "/linger":
                await answer(send, {"held": False})
                await self._wait()
            case "/fail":
                raise ValueError("as asked")
            case path:
                told = {"path": path, "tenant": scope["tenant"], "num_bytes": len(body)}
                await answer(send, told)

    async def _wait(self) -> None:
        event = asyncio.Event()
        self._released.put(event)
        await event.wait()

    async def _flood(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            self.sent_bytes += len(CHUNK)


async def answer(send: Send, content: object) -> None:
    data = json.dumps(content).encode()
    headers = [(b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": False})


class RunningHttp:
    """A server on an event loop of its own thread. Use as a context manager."""

    def __init__(self, *, host: str = HOST, system_helps: bool = True, **changes: Any) -> None:
        """Without `system_helps` the system doesn't tell of clients that are lost."""
        options = {"max_body_bytes": MAX_BODY_BYTES, "max_header_bytes": MAX_HEADER_BYTES}
        self.app = App()
        self.rejections: list[str] = []  # by reason
        self.host = host
        self._system_helps = system_helps
        self._config = FrontendConfig(**{**options, **changes})

    def __enter__(self) -> Self:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http")
        self._thread.start()
        self._server = self.call(self._start)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(grace_s=0)
        self.call_soon(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        self._loop.close()

    @property
    def port(self) -> int:
        return self._server.port

    def stop(self, *, grace_s: float) -> None:
        self.begin_stop(grace_s=grace_s).result(TIMEOUT_S)

    def begin_stop(self, *, grace_s: float) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(self._server.stop(grace_s), self._loop)

    def call(self, make: Callable[[], Any]) -> Any:
        """What a coroutine returns that `make` makes, on the server's loop."""
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(TIMEOUT_S)

    def call_soon(self, do: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(do)

    def wait_none_left(self) -> None:
        """Until no connection is open."""
        self.call(self._server.connections.wait_none_left)

    async def buffer_sizes(self) -> list[int]:
        """What waits in each connection for its client, in bytes."""
        connections = self._server.connections.connections
        return [each.transport.get_write_buffer_size() for each in connections]

    def make_server(self, bound: socket.socket) -> HttpServer:
        keys = KeyRing.of_tokens({KEY: TENANT})
        server = HttpServer(
            self.app,
            bound,
            self._config,
            keys,
            exempt=EXEMPT,
            grpc_port=GRPC_PORT,
            count_rejection=self.rejections.append,
        )
        if not self._system_helps and sys.platform == "linux":
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        return server

    async def _start(self) -> HttpServer:
        server = self.make_server(bind(self.host, 0, option=OPTION))
        await server.start()
        return server


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


class Wire:
    """A client's end of a connection, by the byte. Use as a context manager."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._rest = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, path: str, *, key: str | None = KEY, body: bytes | None = None) -> None:
        lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "host: test"]
        lines += [] if key is None else [f"authorization: Bearer {key}"]
        lines += [] if body is None else [f"content-length: {len(body)}"]
        self.send("\r\n".join([*lines, "", ""]).encode() + (body or b""))

    def read_answer(self) -> Answer:
        """The next answer, which has a length."""
        head = self.read_until(b"\r\n\r\n").decode("latin-1")
        first, *lines = head.split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        body = self._read(int(headers.get("content-length", "0")))
        return Answer(int(first.split()[1]), headers, body)

    def read_to_end(self) -> bytes:
        """All that comes until the server hangs up."""
        data = self._rest
        while chunk := self._receive():
            data += chunk
        self._rest = b""
        return data

    def read_until(self, end: bytes) -> bytes:
        while end not in self._rest:
            self._rest += self._receive_some()
        head, self._rest = self._rest.split(end, 1)
        return head

    def _read(self, num_bytes: int) -> bytes:
        while len(self._rest) < num_bytes:
            self._rest += self._receive_some()
        data, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return data

    def _receive_some(self) -> bytes:
        chunk = self._receive()
        if not chunk:
            raise ConnectionError(f"the server hung up after {self._rest!r}")
        return chunk

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(1 << 16)
        except ConnectionResetError:
            return b""


@contextmanager
def wire(
    server: RunningHttp, context: ssl.SSLContext | None = None, name: str = ""
) -> Iterator[Wire]:
    """A connection; with `context` one by TLS to a server of that `name`."""
    with socket.create_connection((server.host, server.port), timeout=TIMEOUT_S) as connection:
        if context is None:
            yield Wire(connection)
        else:
            with context.wrap_socket(connection, server_hostname=name) as wrapped:
                yield Wire(wrapped)
