"""Answers of the HTTP server itself, to requests that the app never sees."""

import asyncio
import json
from collections.abc import Callable, Mapping

from starlette.types import Receive, Send

from runtime.frontend.openai.errors import Kind, error_body

JSON = "application/json"
# A client that is still sending gets so long to find that it was refused. Closed at once, its
# system may throw the answer away with the connection.
LINGER_S = 2.0
NO_HEADERS: Mapping[str, str] = {}
# As metrics call what is refused with a status.
REASONS: Mapping[int, str] = {
    400: "invalid",
    401: "unauthorized",
    408: "too_slow",
    413: "body_too_large",
    429: "overloaded",
    431: "header_too_large",
}

CountRejection = Callable[[str], None]


class Refusals:
    """Those of one server, which are counted by reason."""

    def __init__(self, count_rejection: CountRejection) -> None:
        self._count_rejection = count_rejection

    def count(self, status: int) -> None:
        self._count_rejection(REASONS[status])

    def content_of(self, kind: Kind, message: str) -> bytes:
        """The body of a refusal, as OpenAI's clients know it, to be sent now."""
        self.count(kind.status)
        return json.dumps(error_body(kind, message)).encode()

    async def refuse(
        self,
        receive: Receive,
        send: Send,
        kind: Kind,
        message: str,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        """Answers instead of the app, whatever is left of a request, and closes the connection."""
        content = self.content_of(kind, message)
        fields = {
            "content-type": JSON,
            "content-length": str(len(content)),
            "connection": "close",
            **headers,
        }
        encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": kind.status, "headers": encoded})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        await _drop_rest(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop_rest(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        return  # it had its time
