"""Long bodies are read on a thread, so that other requests go on meanwhile."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

LONG_BODY_BYTES = 256 << 10

_T = TypeVar("_T")


class LongBodies:
    """For one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def read(self, content: bytes, read: Callable[[bytes], _T]) -> _T:
        """What `read` makes of the content, of a short one at once. Raises what `read` does."""
        if len(content) <= LONG_BODY_BYTES:
            return read(content)
        # One after another: tokenizing finds a thread of the pool, and memory stays bounded.
        async with self._turn:
            return await asyncio.to_thread(read, content)
