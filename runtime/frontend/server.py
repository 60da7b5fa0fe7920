"""One frontend process: its public port, from binding to the end of its engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import inference_pb2_grpc
from protos.auth import AioTokenInterceptor, KeyRing
from runtime.config import FrontendConfig
from runtime.errors import ConfigError
from runtime.frontend.chat import ChatTemplate
from runtime.frontend.engine_client import EngineClient
from runtime.frontend.grpc_service import SERVICE, InferenceService
from runtime.frontend.keys import read_tenants
from runtime.frontend.prompts import PromptReader
from runtime.frontend.text import Tokenizer

logger = logging.getLogger(__name__)

# What is under way has so long to tell its client that the server stops.
STOP_GRACE_S = 1.0
# gRPC's own default; token ids of the longest sequences fit.
MIN_MESSAGE_BYTES = 4 << 20
# A Kubernetes probe can't send metadata.
EXEMPT_FROM_KEY = frozenset({f"/{health.SERVICE_NAME}/"})
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # Finds out that a client's host is gone, and lets clients find out that we are.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


async def run_frontend(
    config: FrontendConfig,
    engine_address: str,
    engine_token: str,
    on_ready: Callable[[int], None],
) -> None:
    """Serves until cancelled, or until the engine's connection ends.

    `on_ready` is called with the bound port once requests are served. Running requests end with
    UNAVAILABLE, whatever ends the frontend.

    Raises ConfigError: the port can't be bound, or the keys can't be used. Raises
    UnavailableError: the engine can't be reached, or is gone.
    """
    keys = _make_key_ring(config)
    server = _make_server(config, keys)
    port = _bind(server, config)
    statuses = health.aio.HealthServicer()
    try:
        engine = await EngineClient.connect(engine_address, engine_token)
        try:
            tokenizer = await asyncio.to_thread(Tokenizer.load, engine.model.path)
            if tokenizer is None:
                logger.warning(
                    "%s has no tokenizer.json: prompts must be token ids, outputs carry no text",
                    engine.model.path,
                )
            template = await asyncio.to_thread(_load_template, config, engine.model.path)
            async with _closing(template):
                prompts = PromptReader(
                    engine.model,
                    tokenizer,
                    template,
                    max_prompt_bytes=config.max_prompt_bytes,
                    chat_template_timeout_s=config.chat_template_timeout_s,
                )
                await _serve(server, InferenceService(engine, prompts, keys), statuses)
                on_ready(port)
                failure = await engine.wait_ended()
                logger.error("the frontend stops: %s", failure)
                raise failure
        finally:
            await statuses.enter_graceful_shutdown()
            await engine.close()
    finally:
        await server.stop(STOP_GRACE_S)


def _load_template(config: FrontendConfig, folder: str) -> ChatTemplate | None:
    override = None if config.chat_template is None else Path(config.chat_template)
    return ChatTemplate.load(folder, override, max_bytes=config.max_prompt_bytes)


@asynccontextmanager
async def _closing(template: ChatTemplate | None) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if template is not None:
            await asyncio.to_thread(template.close)


def _make_key_ring(config: FrontendConfig) -> KeyRing:
    tenants = read_tenants(config)
    if not tenants:
        raise ConfigError("api_key and api_keys are unset: the port would be open to everyone")
    return KeyRing(tenants)


def _make_server(config: FrontendConfig, keys: KeyRing) -> grpc.aio.Server:
    interceptor = AioTokenInterceptor(keys, exempt=EXEMPT_FROM_KEY)
    # Above most texts that are too long, so that the refusal is ours and names the limit.
    message_bytes = max(MIN_MESSAGE_BYTES, 4 * config.max_prompt_bytes)
    options = (*SERVER_OPTIONS, ("grpc.max_receive_message_length", message_bytes))
    return grpc.aio.server(interceptors=[interceptor], options=options)


def _bind(server: grpc.aio.Server, config: FrontendConfig) -> int:
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    try:
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        raise ConfigError(
            f"can't listen at {address}: it is in use, or no address of this machine; "
            "set --port or --host"
        ) from error


async def _serve(
    server: grpc.aio.Server, service: InferenceService, statuses: health.aio.HealthServicer
) -> None:
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(statuses, server)
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    for name in (health.OVERALL_HEALTH, SERVICE):
        await statuses.set(name, health_pb2.HealthCheckResponse.SERVING)
    await server.start()
