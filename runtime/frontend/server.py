"""One frontend process: its public ports, from binding to the end of its engines."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from runtime.credentials import cluster_channel_credentials
from runtime.frontend.engine_client import EngineClient
from runtime.frontend.engine_pool import EnginePool
from runtime.frontend.grpc_port import private_folder
from runtime.frontend.grpc_server import GrpcServer
from runtime.frontend.http_refusal import Refusals
from runtime.frontend.http_server import HttpServer
from runtime.frontend.keys import make_key_ring
from runtime.frontend.metrics import FrontendMetrics
from runtime.frontend.open_files import allow_connections
from runtime.frontend.public_socket import bind
from runtime.frontend.services import open_services
from runtime.frontend.tracing import open_tracing
from runtime.frontend_config import FrontendConfig

logger = logging.getLogger(__name__)

# What is under way has so long to tell its client that the server stops.
STOP_GRACE_S = 1.0
# After the drain: connections that have got all of their answer, and don't close.
DRAINED_GRACE_S = 1.0


class Ports(NamedTuple):
    """Where a frontend serves."""

    grpc: int
    http: int


async def run_frontend(
    config: FrontendConfig,
    engine_addresses: Sequence[str],
    engine_token: str,
    on_ready: Callable[[Ports], None],
    *,
    reuse_port: bool = False,
    draining: asyncio.Event | None = None,
) -> None:
    """Serves until cancelled, drained, or until no engine can be used any more.

    `on_ready` is called with the bound ports once requests are served. Once `draining` is set, new
    requests are refused, those that run may finish for drain_timeout_s, and it returns. Requests
    that run otherwise end with UNAVAILABLE, whatever ends the frontend.

    Raises ConfigError: a port can't be bound, or keys or files can't be used. Raises
    UnavailableError: no engine can be reached, or all are gone for good.
    """
    draining = draining or asyncio.Event()
    config = replace(config, max_connections=allow_connections(config.max_connections))
    keys = make_key_ring(config)
    credentials = cluster_channel_credentials(config.cluster_certs)
    tracing = open_tracing(config.otlp_endpoint)
    metrics = FrontendMetrics()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, tracing.close)
        bind_here = partial(bind, config.host, reuse_port=reuse_port)
        grpc_bound = stack.enter_context(closing(bind_here(config.port, option="--port")))
        http_bound = stack.enter_context(closing(bind_here(config.http_port, option="--http-port")))
        server = GrpcServer(
            grpc_bound,
            stack.enter_context(private_folder()),
            config,
            keys,
            Refusals(metrics.count_rejection),
            http_port=int(http_bound.getsockname()[1]),
        )
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        pool = await EnginePool.connect(
            engine_addresses,
            partial(EngineClient.connect, token=engine_token, credentials=credentials),
            resume_timeout_s=config.resume_timeout_s,
            routing=config.routing,
            on_resumed=metrics.count_resumed,
            on_reconnected=metrics.count_reconnect,
        )
        stack.push_async_callback(pool.close)
        stack.push_async_callback(server.set_not_serving)
        services = await stack.enter_async_context(
            open_services(
                config, pool, engine_token, metrics=metrics, tracing=tracing, draining=draining
            )
        )
        app, exempt = services.http_app()
        http = HttpServer(
            app,
            http_bound,
            config,
            keys,
            exempt=exempt,
            grpc_port=server.port,
            count_rejection=services.count_rejection,
        )
        # Before the ports are closed: its clients hear that the engine is gone.
        stack.push_async_callback(http.stop, STOP_GRACE_S)
        stack.push_async_callback(pool.close)
        await http.start()
        await server.start(services.grpc_service(keys))
        on_ready(Ports(server.port, http.port))
        await _serve(server, pool, draining)
        await server.set_not_serving()
        await services.finish_requests()
        await http.stop(DRAINED_GRACE_S)


async def _serve(server: GrpcServer, pool: EnginePool, draining: asyncio.Event) -> None:
    """Tells `server` whether requests can run, until it is to drain.

    Raises UnavailableError: there will be no engine.
    """
    health = asyncio.create_task(_tell_health(server, pool), name="health")
    drain = asyncio.create_task(draining.wait(), name="drain")
    end = asyncio.create_task(pool.wait_ended(), name="end of engines")
    try:
        await asyncio.wait([drain, end], return_when=asyncio.FIRST_COMPLETED)
        if end.done():
            failure = end.result()
            logger.error("the frontend stops: %s", failure)
            raise failure
    finally:
        drain.cancel()
        end.cancel()
        health.cancel()


async def _tell_health(server: GrpcServer, pool: EnginePool) -> None:
    while True:
        await server.set_serving(pool.why_not_ready() is None)
        await pool.wait_changed()
