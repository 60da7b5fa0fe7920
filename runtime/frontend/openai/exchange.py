"""One HTTP exchange: a body comes, an answer goes, and a client that leaves ends the work."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from runtime.errors import LockstepError
from runtime.frontend.openai.errors import STATUSES, body_of, error_body, headers_of, kind_of

logger = logging.getLogger(__name__)

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
INTERNAL_ERROR = "the server failed; its log says why"


class SlowReaderError(ConnectionError):
    """A client took nothing for longer than it may."""


class Reply:
    """What goes to the client: one JSON text, or events."""

    def __init__(
        self, send: Send, *, headers: Mapping[str, str], fields: Collection[str], timeout_s: float
    ) -> None:
        """`fields` are those of the request, which errors may name."""
        self.has_begun = False
        self._send_message = send
        self._headers = dict(headers)
        self._fields = fields
        self._timeout_s = timeout_s
        self._has_events = False

    def set_header(self, name: str, value: str) -> None:
        """Of the answer, which hasn't begun."""
        self._headers[name] = value

    async def send_json(
        self, content: object, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """A whole answer. Raises SlowReaderError."""
        data = to_json(content)
        more = {"content-type": JSON, "content-length": str(len(data))}
        await self._begin(status, {**more, **(headers or {})})
        await self._send_body(data, has_more=False)

    async def send_event(self, content: object) -> None:
        """The next event of a stream, which the first one begins. Raises SlowReaderError."""
        if not self.has_begun:
            self._has_events = True
            # Proxies that know the last header don't gather events.
            more = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            await self._begin(200, {"content-type": EVENT_STREAM, **more})
        await self._send_body(b"data: " + to_json(content) + b"\n\n", has_more=True)

    async def end_events(self) -> None:
        """After a good end. Raises SlowReaderError."""
        await self._send_body(b"data: [DONE]\n\n", has_more=False)

    async def fail(self, error: LockstepError) -> None:
        """Raises SlowReaderError."""
        await self._fail(kind_of(error).status, body_of(error, self._fields), headers_of(error))

    async def fail_internally(self) -> None:
        """Raises SlowReaderError."""
        await self._fail(500, error_body(STATUSES[500], INTERNAL_ERROR), {})

    async def _fail(self, status: int, content: object, headers: Mapping[str, str]) -> None:
        if not self.has_begun:
            await self.send_json(content, status=status, headers=headers)
        elif self._has_events:
            await self.send_event(content)
            await self._send_body(b"", has_more=False)

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.has_begun = True
        pairs = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in {**self._headers, **headers}.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _send_body(self, data: bytes, *, has_more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": has_more})

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_message(message)
        except TimeoutError as error:
            raise SlowReaderError(
                f"the client took nothing for write_timeout_s={self._timeout_s:g}"
            ) from error


Work = Callable[[bytes, Reply], Awaitable[None]]


class Exchange(Response):
    """Reads a body, then does `work` until that is done or the client is gone."""

    def __init__(
        self, work: Work, *, headers: Mapping[str, str], fields: Collection[str], timeout_s: float
    ) -> None:
        """`headers` are of every answer; `timeout_s` is a client's for taking the next part."""
        super().__init__()
        self._work = work
        self._reply_headers = headers
        self._fields = fields
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = await _read(receive)
        if content is None:
            return
        reply = Reply(
            send, headers=self._reply_headers, fields=self._fields, timeout_s=self._timeout_s
        )
        working = asyncio.create_task(self._answer(content, reply))
        leaving = asyncio.create_task(_wait_for_leaving(receive))
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()  # a client that has left, or a server that ends: nobody reads it
            leaving.cancel()
            await asyncio.wait((working, leaving))
        if not working.cancelled():
            working.result()

    async def _answer(self, content: bytes, reply: Reply) -> None:
        try:
            try:
                await self._work(content, reply)
            except LockstepError as error:
                await reply.fail(error)
            except SlowReaderError:
                raise
            except Exception:
                logger.exception("a request failed")
                await reply.fail_internally()
        except SlowReaderError as error:
            # The answer stays incomplete, so the server closes the connection.
            logger.info("an answer was given up: %s", error)


async def _read(receive: Receive) -> bytes | None:
    """The whole body, which a middleware keeps within limits. None: the client is gone."""
    parts: list[bytes] = []
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _wait_for_leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
