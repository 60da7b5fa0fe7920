"""Limits on HTTP requests, between the server and the app."""

import asyncio
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import CapacityError, InvalidRequestError
from runtime.frontend.body_space import BodySpace, Share
from runtime.frontend.http_refusal import NO_HEADERS, Refusals
from runtime.frontend.openai.errors import KINDS, STATUSES, Kind, headers_of, kind_of

VERSIONS = frozenset({"1.0", "1.1"})
BAD_REQUEST = KINDS[InvalidRequestError]
# Of a header beside its name and value: colon, space, line end.
HEADER_EXTRA_BYTES = 4
# Who has no key asks for pages and probes, to which nothing is sent.
MAX_STRANGER_BODY_BYTES = 1024


class HeadLimit:
    """Refuses requests by their head: too long, or not of HTTP/1, as gRPC's are."""

    def __init__(
        self, app: ASGIApp, refusals: Refusals, *, max_header_bytes: int, grpc_port: int
    ) -> None:
        self._app = app
        self._refusals = refusals
        self._max_header_bytes = max_header_bytes
        self._grpc_port = grpc_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] not in VERSIONS:
            message = wrong_port(self._grpc_port)
            await self._refusals.refuse(receive, send, BAD_REQUEST, message)
        elif _num_bytes(scope) > self._max_header_bytes:
            message = head_too_long(self._max_header_bytes)
            await self._refusals.refuse(receive, send, STATUSES[431], message)
        else:
            await self._app(scope, receive, send)


class WholeRequests:
    """Gives the app requests whose body is there, and cancels it once their client is gone.

    A body takes room in `space` from its first byte until its request has been answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        space: BodySpace,
        refusals: Refusals,
        *,
        max_body_bytes: int,
        read_timeout_s: float,
    ) -> None:
        self._app = app
        self._space = space
        self._refusals = refusals
        self._max_body_bytes = max_body_bytes
        self._read_timeout_s = read_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._space.share() as share:
                body = await self._read_in_time(scope, receive, share)
                if body is not None:
                    await self._run(scope, body, receive, send)
        except _RefusedError as error:
            await self._refusals.refuse(receive, send, error.kind, str(error), error.headers)

    async def _read_in_time(self, scope: Scope, receive: Receive, share: Share) -> bytes | None:
        """The body; None where the client left before its end. Raises _RefusedError."""
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await self._read(scope, receive, share)
        except TimeoutError as error:
            raise _RefusedError(
                STATUSES[408],
                f"the body of the request didn't arrive within {self._read_timeout_s:g} s: "
                "send less at once, or ask for a higher --read-timeout-s",
            ) from error
        except CapacityError as error:
            raise _RefusedError(kind_of(error), str(error), headers_of(error)) from error

    async def _read(self, scope: Scope, receive: Receive, share: Share) -> bytes | None:
        self._check_length(scope, _length_of(scope))
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            share.grow(len(message["body"]))
            body += message["body"]
            self._check_length(scope, len(body))
            if not message["more_body"]:
                return bytes(body)

    def _check_length(self, scope: Scope, num_bytes: int) -> None:
        if not scope["tenant"] and num_bytes > MAX_STRANGER_BODY_BYTES:
            raise _RefusedError(
                STATUSES[413],
                f"the body of a request without a key may have {MAX_STRANGER_BODY_BYTES} bytes",
            )
        if num_bytes > self._max_body_bytes:
            raise _RefusedError(
                STATUSES[413],
                f"the body of the request is longer than max_body_bytes={self._max_body_bytes}: "
                "send less at once",
            )

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        request = _Request(body, send)
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(request.watch(receive, task))
        try:
            await self._app(scope, request.receive, request.send)
        except asyncio.CancelledError:
            if not request.is_left:
                raise
            task.uncancel()
        finally:
            watch.cancel()


class _Request:
    """What the app sees of a request, and how far it has got with it."""

    def __init__(self, body: bytes, send: Send) -> None:
        self._body: bytes | None = body
        self._send = send
        self._is_answered = False
        self._left = asyncio.Event()

    @property
    def is_left(self) -> bool:
        """The client went away before it had its answer."""
        return self._left.is_set()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_answered = True
        await self._send(message)
        # uvicorn only waits for readers that are slow; other requests want a turn, and a client
        # that has left wants to be noticed.
        await asyncio.sleep(0)

    async def watch(self, receive: Receive, task: asyncio.Task[None]) -> None:
        """Cancels `task` when the client leaves; what follows an answer isn't disturbed."""
        await receive()
        if not self._is_answered:
            self._left.set()
            task.cancel()


class _RefusedError(Exception):
    """A body isn't taken."""

    def __init__(self, kind: Kind, message: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        super().__init__(message)
        self.kind = kind
        self.headers = headers


def head_too_long(max_header_bytes: int) -> str:
    return f"the head of the request is longer than max_header_bytes={max_header_bytes}"


def wrong_port(grpc_port: int) -> str:
    return f"this is the HTTP port; gRPC is served on port {grpc_port}"


def kind_of_status(status: int) -> Kind:
    return STATUSES.get(status, BAD_REQUEST)


def _num_bytes(scope: Scope) -> int:
    target = len(scope["raw_path"]) + len(scope["query_string"])
    return target + sum(
        len(name) + len(value) + HEADER_EXTRA_BYTES for name, value in scope["headers"]
    )


def _length_of(scope: Scope) -> int:
    """What the request says; 0 where it doesn't. The server has checked that it is a number."""
    return max(
        (int(value) for name, value in scope["headers"] if name == b"content-length"), default=0
    )
