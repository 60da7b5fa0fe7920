"""Requests by names of their own, or those that their clients gave them."""

import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
MAX_ID_CHARACTERS = 128


class RequestIds:
    """Sets scope["request_id"], and the header of answers that have none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope["request_id"] = request_id_of(scope["headers"])

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start" and not _is_named(message["headers"]):
                message["headers"] = [*message["headers"], (HEADER, request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_named)


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's, or a new one where it has none that could be sent back."""
    asked = next((value.decode("latin-1") for name, value in headers if name == HEADER), "")
    return asked if is_request_id(asked) else uuid.uuid4().hex


def is_request_id(value: str) -> bool:
    """Whether it can stand in a header, and isn't too long."""
    return value.isascii() and value.isprintable() and 1 <= len(value) <= MAX_ID_CHARACTERS


def _is_named(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == HEADER for name, _ in headers)
