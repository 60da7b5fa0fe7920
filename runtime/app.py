"""`lockstep serve`: engine and frontends, started together, ended together."""

import gc
import logging
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import grpc

from runtime.collector import Sweep, calm_collector
from runtime.config import EngineConfig, require_key
from runtime.credentials import cluster_server_credentials
from runtime.driver import running_engine
from runtime.engine import Engine
from runtime.engine_service import EngineServer
from runtime.errors import LockstepError
from runtime.frontend.keys import read_tenants
from runtime.frontend_config import FrontendConfig, ServeConfig
from runtime.frontend_processes import (
    ENGINE_TOKEN_VARIABLE,
    FRONTEND_STOP_S,
    Frontends,
    running_frontends,
)
from runtime.interrupts import DrainAsked, Interrupted, drainable
from runtime.ports import check_port_is_free, reserved

logger = logging.getLogger(__name__)

ENGINE_STOP_S = 1.0
SIGNAL_S = 1.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# Where a port that is bound to all addresses is reached from this host.
REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def serve(
    engine_config: EngineConfig,
    frontend_config: FrontendConfig,
    serve_config: ServeConfig,
    *,
    verbose: bool = False,
) -> LockstepError | None:
    """Serves until a signal comes, or the engine or its frontends end; returns what ended it.

    Raises ConfigError: the configuration can't be served; nothing is left running.
    """
    check_port_is_free(
        "engine_host", serve_config.engine_host, "engine_port", serve_config.engine_port
    )
    made: list[str] = []  # lines on keys that nobody knows yet
    token = _engine_token(serve_config, made)
    credentials = cluster_server_credentials(engine_config.cluster_certs)
    if serve_config.engine_host not in LOOPBACK and credentials is None:
        logger.warning(
            "engine_host=%s without cluster_certs: token and prompts go over the network as such",
            serve_config.engine_host,
        )
    with ExitStack() as stack:
        if serve_config.frontends:
            frontend_config = _with_key(frontend_config, made)
            frontend_config = stack.enter_context(reserved(frontend_config))
        engine = stack.enter_context(
            running_engine(engine_config, on_idle=gc.collect, on_wait=Sweep())
        )
        server = stack.enter_context(engine_server(engine, serve_config, token, credentials))
        frontends = stack.enter_context(
            running_frontends(
                # They have this engine alone, and end with it.
                replace(
                    frontend_config,
                    cluster_certs=engine_config.cluster_certs,
                    resume_timeout_s=0.0,
                ),
                count=serve_config.frontends,
                engine_address=_address(
                    REACHED_AT.get(serve_config.engine_host, serve_config.engine_host), server.port
                ),
                engine_token=token,
                verbose=verbose,
                ready_timeout_s=engine_config.startup_timeout_s,
                on_lost=engine.end,
            )
        )
        calm_collector()
        try:
            for line in (*made, _describe(engine, server, frontend_config, serve_config)):
                print(f"lockstep: {line}", flush=True)
            ended = wait_for_end(engine, frontends, frontend_config.drain_timeout_s)
        except Interrupted:  # the good end of a server
            return None
        # Its clients are to hear why, by way of the frontends, which end with their engine.
        frontends.leave()
        server.stop(grace_s=ENGINE_STOP_S)
        frontends.wait_ended(FRONTEND_STOP_S)
        return ended


def wait_for_end(
    engine: Engine, frontends: Frontends, drain_timeout_s: float
) -> LockstepError | None:
    """Returns what ended the engine. Raises Interrupted: a signal asks for it, all is drained."""
    try:
        with drainable():
            # In turns: a signal that comes just before a wait is seen after it.
            while (ended := engine.wait(SIGNAL_S)) is None:
                pass
            return ended
    except DrainAsked:
        logger.info("draining, for %g s at most", drain_timeout_s)
        deadline = time.monotonic() + drain_timeout_s
        engine.drain()
        frontends.drain(drain_timeout_s + FRONTEND_STOP_S)
        # Frontends elsewhere have theirs too.
        engine.wait_idle(max(0.0, deadline - time.monotonic()))
    if (failure := engine.wait(0)) is not None:
        return failure
    # The rest goes as after a second signal, and may take no longer.
    signal.raise_signal(signal.SIGTERM)
    return None


@contextmanager
def engine_server(
    engine: Engine,
    config: ServeConfig,
    token: str,
    credentials: grpc.ServerCredentials | None,
) -> Iterator[EngineServer]:
    host = f"[{config.engine_host}]" if ":" in config.engine_host else config.engine_host
    server = EngineServer(
        engine, token=token, host=host, port=config.engine_port, credentials=credentials
    )
    server.start()
    try:
        yield server
    finally:
        server.stop(grace_s=ENGINE_STOP_S)


def _engine_token(config: ServeConfig, made: list[str]) -> str:
    """The operator's, or one that is made; `made` gets it where frontends elsewhere need it."""
    token = os.environ.get(ENGINE_TOKEN_VARIABLE)
    if token:
        require_key(ENGINE_TOKEN_VARIABLE, token)
        return token
    token = secrets.token_urlsafe(24)
    if config.frontends == 0 or config.engine_port != 0:
        made.append(f"engine token (made for this run): {token}")
    return token


def _with_key(config: FrontendConfig, made: list[str]) -> FrontendConfig:
    if read_tenants(config):
        return config
    key = secrets.token_urlsafe(24)
    made.append(f"api key (made for this run): {key}")
    return replace(config, api_key=key)


def _describe(
    engine: Engine, server: EngineServer, config: FrontendConfig, serve_config: ServeConfig
) -> str:
    name = engine.model.name
    if serve_config.frontends == 0:
        return f"serving {name} to frontends on {_address(serve_config.engine_host, server.port)}"
    scheme = "http" if config.tls_cert is None else "https"
    return (
        f"serving {name} on {_address(config.host, config.port)} (gRPC) and "
        f"{scheme}://{_address(config.host, config.http_port)} (HTTP)"
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
