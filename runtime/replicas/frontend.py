"""A frontend without ports of its own, over replicas that come and go."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from starlette.types import ASGIApp, Receive, Scope, Send

from protos.auth import KeyRing
from runtime.credentials import cluster_channel_credentials
from runtime.frontend.engine_client import EngineClient
from runtime.frontend.engine_pool import EnginePool
from runtime.frontend.http_gate import gated
from runtime.frontend.http_ids import RequestIds
from runtime.frontend.http_refusal import Refusals
from runtime.frontend.keys import make_key_ring
from runtime.frontend.metrics import FrontendMetrics
from runtime.frontend.relayed_calls import RelayedCalls
from runtime.frontend.services import Services, open_services
from runtime.frontend.tracing import open_tracing
from runtime.frontend_config import FrontendConfig

logger = logging.getLogger(__name__)

# How often it is asked which replicas there are.
FOLLOW_S = 1.0

# The addresses of the replicas that there are; None where that can't be told now.
FindReplicas = Callable[[], Awaitable[Sequence[str] | None]]


@asynccontextmanager
async def replica_frontend(
    config: FrontendConfig, token: str, find_replicas: FindReplicas
) -> AsyncIterator["ReplicaFrontend"]:
    """Waits for the first replica, however long. `token` is the replicas'.

    Raises ConfigError: keys, files or the model's tokenizer can't be used. Raises
    UnavailableError: no replica can be reached.
    """
    keys = make_key_ring(config)
    credentials = cluster_channel_credentials(config.cluster_certs)
    tracing = open_tracing(config.otlp_endpoint)
    metrics = FrontendMetrics()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, tracing.close)
        while not (addresses := await find_replicas()):
            await asyncio.sleep(FOLLOW_S)
        pool = await EnginePool.connect(
            addresses,
            partial(EngineClient.connect, token=token, credentials=credentials),
            resume_timeout_s=config.resume_timeout_s,
            routing=config.routing,
            on_resumed=metrics.count_resumed,
            on_reconnected=metrics.count_reconnect,
        )
        stack.push_async_callback(pool.close)
        services = await stack.enter_async_context(
            open_services(
                config, pool, token, metrics=metrics, tracing=tracing, draining=asyncio.Event()
            )
        )
        frontend = ReplicaFrontend(config, pool, services, keys, find_replicas)
        stack.push_async_callback(frontend.close)
        yield frontend


class ReplicaFrontend:
    """An ASGI application, and calls of the gRPC service. Made by `replica_frontend`."""

    def __init__(
        self,
        config: FrontendConfig,
        pool: EnginePool,
        services: Services,
        keys: KeyRing,
        find_replicas: FindReplicas,
    ) -> None:
        self.calls = RelayedCalls(
            services.grpc_service(keys), keys, max_message_bytes=config.max_body_bytes
        )
        self._app = _http_app(config, services, keys)
        self._tasks = (
            asyncio.create_task(_follow(pool, find_replicas), name="replicas"),
            asyncio.create_task(_fail_when_ended(pool), name="end of engines"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI wants it. There are no web sockets."""
        match scope["type"]:
            case "http":
                await self._app(scope, receive, send)
            case "lifespan":
                while True:
                    message = await receive()
                    await send({"type": f"{message['type']}.complete"})
                    if message["type"] == "lifespan.shutdown":
                        return
            case _:
                await send({"type": "websocket.close"})

    def check(self) -> None:
        """Raises UnavailableError, or what else has ended it: it is of no use any more."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _http_app(config: FrontendConfig, services: Services, keys: KeyRing) -> ASGIApp:
    app, exempt = services.http_app()
    refusals = Refusals(services.count_rejection)
    return RequestIds(gated(app, config, keys, refusals, exempt=exempt))


async def _follow(pool: EnginePool, find_replicas: FindReplicas) -> None:
    while True:
        await asyncio.sleep(FOLLOW_S)
        addresses = await find_replicas()
        if addresses is not None and {*addresses} != {*pool.addresses}:
            logger.info("the replicas are at %s", ", ".join(addresses) or "no address")
            pool.follow(sorted(addresses))


async def _fail_when_ended(pool: EnginePool) -> None:
    raise await pool.wait_ended()
