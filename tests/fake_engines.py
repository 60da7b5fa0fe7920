"""Engines that do what a test says, behind ports of their own, and a pool of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any

from runtime.engine_service import EngineServer
from runtime.frontend.engine_client import EngineClient
from runtime.frontend.engine_pool import EnginePool
from runtime.request import Request
from tests.frontend import TIMEOUT_S, FakeConnection, FakeEngine, make_model
from tests.params import complete_params

TOKEN = "engine-token"


class Fakes:
    """Engines that do what the test says, and the requests that any of them gets."""

    def __init__(self, *models: dict[str, Any]) -> None:
        self.added: SimpleQueue[tuple[FakeConnection, Request]] = SimpleQueue()
        self.engines = [FakeEngine(make_model(**each)) for each in models]
        self._servers = [EngineServer(each, TOKEN) for each in self.engines]
        for engine, server in zip(self.engines, self._servers, strict=True):
            engine.added = self.added
            server.start()
        self.addresses = [f"127.0.0.1:{server.port}" for server in self._servers]
        self.clients: list[EngineClient] = []

    def stop(self) -> None:
        for server in self._servers:
            server.stop(grace_s=0)

    def stop_one(self, address: str) -> None:
        self._servers[self.addresses.index(address)].stop(grace_s=0)

    async def next(self) -> tuple[FakeConnection, Request]:
        return await asyncio.to_thread(self.added.get, timeout=TIMEOUT_S)

    async def connect(self, address: str) -> EngineClient:
        client = await EngineClient.connect(address, TOKEN)
        self.clients.append(client)
        return client

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[EnginePool]:
        """With all of them connected."""
        pool = await EnginePool.connect(self.addresses, self.connect, resume_timeout_s=TIMEOUT_S)
        async with asyncio.timeout(TIMEOUT_S):
            while len(pool._clients) + len(pool._others) < len(self.engines):
                await asyncio.sleep(0)
        try:
            yield pool
        finally:
            await pool.close()


def make_request(**params: Any) -> Request:
    sampling = complete_params(max_tokens=4, **params)
    return Request(request_id=0, prompt_token_ids=[*range(10, 20)], params=sampling, seed=1)
