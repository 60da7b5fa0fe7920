"""One frontend process: its public ports, from binding to the end of its engines."""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from protos.auth import KeyRing
from runtime.credentials import cluster_channel_credentials
from runtime.errors import UnavailableError
from runtime.frontend.engine_client import EngineClient
from runtime.frontend.engine_pool import EnginePool
from runtime.frontend.grpc_port import private_folder
from runtime.frontend.grpc_server import GrpcServer
from runtime.frontend.grpc_service import InferenceService
from runtime.frontend.http_refusal import Refusals
from runtime.frontend.http_server import HttpServer
from runtime.frontend.keys import make_key_ring
from runtime.frontend.metrics import FrontendMetrics
from runtime.frontend.observer import Observer
from runtime.frontend.open_files import allow_connections
from runtime.frontend.openai.app import OPEN_PATHS, make_app
from runtime.frontend.openai.routes import Operations
from runtime.frontend.openai.service import OpenAIService
from runtime.frontend.pages import pages
from runtime.frontend.public_socket import bind
from runtime.frontend.request_slots import RequestSlots
from runtime.frontend.resume_proof import ResumeProofs
from runtime.frontend.texts import Texts, open_texts
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
        proofs = ResumeProofs(engine_token)
        texts = await stack.enter_async_context(open_texts(config, pool, proofs))
        observer = Observer(metrics, tracing, model=pool.model.name)
        frontend = _Frontend(config, pool, texts, observer, draining)
        http = frontend.http_server(http_bound, keys, grpc_port=server.port)
        # Before the ports are closed: its clients hear that the engine is gone.
        stack.push_async_callback(http.stop, STOP_GRACE_S)
        stack.push_async_callback(pool.close)
        await http.start()
        await server.start(frontend.grpc_service(keys))
        on_ready(Ports(server.port, http.port))
        await frontend.run(server)
        await server.set_not_serving()
        await frontend.finish_requests()
        await http.stop(DRAINED_GRACE_S)


class _Frontend:
    """The services of one frontend, over what they share."""

    def __init__(
        self,
        config: FrontendConfig,
        pool: EnginePool,
        texts: Texts,
        observer: Observer,
        draining: asyncio.Event,
    ) -> None:
        self._config = config
        self._pool = pool
        self._texts = texts
        self._observer = observer
        self._draining = draining
        self._slots = RequestSlots(config.max_requests_per_key, config.max_requests)

    def grpc_service(self, keys: KeyRing) -> InferenceService:
        return InferenceService(
            self._texts.generator,
            self._pool,
            keys,
            self._observer,
            self._slots,
            why_refused=self.why_refused,
            write_timeout_s=self._config.write_timeout_s,
        )

    def http_server(self, bound: socket.socket, keys: KeyRing, *, grpc_port: int) -> HttpServer:
        service = OpenAIService(
            self._texts.generator,
            self._observer,
            self._texts.parsers,
            why_refused=self.why_refused,
            take_slot=self._slots.take,
        )
        files = pages()
        app = make_app(
            service,
            Operations(
                metrics=self._scrape, stats=self._pool.stats, why_not_ready=self.why_not_ready
            ),
            pages=files,
            write_timeout_s=self._config.write_timeout_s,
        )
        exempt = (*OPEN_PATHS, *files)
        return HttpServer(
            app,
            bound,
            self._config,
            keys,
            exempt=exempt,
            grpc_port=grpc_port,
            count_rejection=self._observer.metrics.count_rejection,
        )

    def why_refused(self) -> str | None:
        """Why no request is taken now."""
        if self._draining.is_set():
            return "the server is draining and takes no more requests"
        return self._pool.why_refused()

    def why_not_ready(self) -> str | None:
        """Why a request wouldn't be taken, or would wait for its engine's workers."""
        return self.why_refused() or self._pool.why_not_ready()

    async def run(self, server: GrpcServer) -> None:
        """Tells `server` whether requests can run, until it is to drain.

        Raises UnavailableError: there will be no engine.
        """
        health = asyncio.create_task(self._tell_health(server), name="health")
        drain = asyncio.create_task(self._draining.wait(), name="drain")
        end = asyncio.create_task(self._pool.wait_ended(), name="end of engines")
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

    async def _tell_health(self, server: GrpcServer) -> None:
        while True:
            await server.set_serving(self._pool.why_not_ready() is None)
            await self._pool.wait_changed()

    async def finish_requests(self) -> None:
        """Waits for those that run, for drain_timeout_s at most."""
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._slots.wait_none_taken()
        except TimeoutError:
            logger.warning(
                "%d requests haven't finished within drain_timeout_s=%g and are cut",
                self._slots.num_taken,
                self._config.drain_timeout_s,
            )

    async def _scrape(self) -> tuple[bytes, str]:
        try:
            stats = await self._pool.stats()
        except UnavailableError:  # the frontend's own numbers are there all the same
            stats = {}
        return self._observer.metrics.render(stats, self._pool.model, self._pool.addresses)
