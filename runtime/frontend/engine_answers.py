"""Statistics of several engines, some of which may hang."""

import asyncio
import logging
from collections.abc import Mapping

from runtime.errors import UnavailableError
from runtime.frontend.engine_client import EngineClient
from runtime.request import EngineStats

logger = logging.getLogger(__name__)

# An engine that takes longer is shown as missing: who scrapes waits for 10 s as a rule.
STATS_TIMEOUT_S = 2.0


async def gather_stats(clients: Mapping[str, EngineClient]) -> dict[str, EngineStats]:
    """Of the engines that answer, by address. Raises UnavailableError: none does."""
    answers = await asyncio.gather(*(_stats_of(*each) for each in clients.items()))
    found = {
        address: answer
        for address, answer in zip(clients, answers, strict=True)
        if answer is not None
    }
    if clients and not found:
        raise UnavailableError(f"no engine has answered within {STATS_TIMEOUT_S:g} s")
    return found


async def _stats_of(address: str, client: EngineClient) -> EngineStats | None:
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return await client.stats()
    except UnavailableError:  # it has just gone
        return None
    except TimeoutError:
        logger.warning("the engine at %s hasn't answered within %g s", address, STATS_TIMEOUT_S)
        return None
