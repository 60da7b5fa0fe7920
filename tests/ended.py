"""Waiting for work that signals end."""

import asyncio
from collections.abc import Coroutine
from typing import Any

TIMEOUT_S = 30


async def ended(work: Coroutine[Any, Any, None]) -> None:
    """Fails where `work` doesn't end by itself.

    `asyncio.wait_for` would cancel it then, which such work takes for a signal: a good end.
    """
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait([task], timeout=TIMEOUT_S)
    assert done, "the signal was lost"
    await task
