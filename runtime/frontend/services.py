"""What a frontend serves, whoever has its ports: gRPC methods and an HTTP app over engines."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from starlette.types import ASGIApp

from protos.auth import KeyRing
from runtime.errors import UnavailableError
from runtime.frontend.engine_pool import EnginePool
from runtime.frontend.grpc_service import InferenceService
from runtime.frontend.metrics import FrontendMetrics
from runtime.frontend.observer import Observer
from runtime.frontend.openai.app import OPEN_PATHS, make_app
from runtime.frontend.openai.routes import Operations
from runtime.frontend.openai.service import OpenAIService
from runtime.frontend.pages import pages
from runtime.frontend.request_slots import RequestSlots
from runtime.frontend.resume_proof import ResumeProofs
from runtime.frontend.texts import Texts, open_texts
from runtime.frontend.tracing import Tracing
from runtime.frontend_config import FrontendConfig

logger = logging.getLogger(__name__)


class HttpApp(NamedTuple):
    """An app, and the paths that need no key."""

    app: ASGIApp
    exempt: tuple[str, ...]


@asynccontextmanager
async def open_services(
    config: FrontendConfig,
    pool: EnginePool,
    engine_token: str,
    *,
    metrics: FrontendMetrics,
    tracing: Tracing,
    draining: asyncio.Event,
) -> AsyncIterator["Services"]:
    """Once `draining` is set, new requests are refused.

    Raises ConfigError: the chat template or the model's tokenizer can't be used.
    """
    async with open_texts(config, pool, ResumeProofs(engine_token)) as texts:
        observer = Observer(metrics, tracing, model=pool.model.name)
        yield Services(config, pool, texts, observer, draining)


class Services:
    """The services of one frontend, over what they share. Made by `open_services`."""

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

    def http_app(self) -> HttpApp:
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
        return HttpApp(app, (*OPEN_PATHS, *files))

    def count_rejection(self, reason: str) -> None:
        """Of one of metrics.REJECTIONS, made before a request reached a service."""
        self._observer.metrics.count_rejection(reason)

    def why_refused(self) -> str | None:
        """Why no request is taken now."""
        if self._draining.is_set():
            return "the server is draining and takes no more requests"
        return self._pool.why_refused()

    def why_not_ready(self) -> str | None:
        """Why a request wouldn't be taken, or would wait for its engine's workers."""
        return self.why_refused() or self._pool.why_not_ready()

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
