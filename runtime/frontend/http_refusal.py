"""Answers of the HTTP server itself, to requests that the app never sees."""

import asyncio
import json
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from runtime.frontend.openai.errors import Kind, error_body

JSON = "application/json"
# A client that is still sending gets so long to find that it was refused. Closed at once, its
# system may throw the answer away with the connection.
LINGER_S = 2.0
NO_HEADERS: Mapping[str, str] = {}


def content_of(kind: Kind, message: str) -> bytes:
    """The body of a refusal, as OpenAI's clients know it."""
    return json.dumps(error_body(kind, message)).encode()


async def refuse(
    scope: Scope,
    receive: Receive,
    send: Send,
    kind: Kind,
    message: str,
    headers: Mapping[str, str] = NO_HEADERS,
) -> None:
    """Answers instead of the app, whatever is left of the request, and closes the connection."""
    content = content_of(kind, message)
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
