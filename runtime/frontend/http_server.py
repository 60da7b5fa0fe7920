"""The public HTTP port of a frontend, around its app."""

import asyncio
import logging
import socket
import ssl
import sys

from starlette.types import ASGIApp
from uvicorn.config import Config

from protos import tls
from protos.auth import KeyRing
from runtime.errors import ConfigError
from runtime.frontend.http_connection import Connection, ConnectionLimits, Connections
from runtime.frontend.http_gate import gated
from runtime.frontend.http_ids import RequestIds
from runtime.frontend.http_limits import HeadLimit
from runtime.frontend.http_refusal import CountRejection, Refusals
from runtime.frontend.public_socket import BACKLOG, listen
from runtime.frontend_config import FrontendConfig

logger = logging.getLogger(__name__)

# A client that asks for nothing more keeps its connection so long.
IDLE_TIMEOUT_S = 60
# What the system holds for one client at most, about twice that; it would take megabytes, and
# report that a slow reader took something only once it took most of them.
SEND_BUFFER_BYTES = 128 << 10
# Whether a client that says nothing is still there is asked after so long.
KEEPALIVE_S = 60
# What was cut has so long to clean up.
CUT_S = 5.0


class HttpServer:
    """Serves an app with the limits and keys of a frontend, on the running event loop.

    What the app sees, `http_gate.gated` tells.
    """

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        config: FrontendConfig,
        keys: KeyRing,
        *,
        exempt: tuple[str, ...],
        grpc_port: int,
        count_rejection: CountRejection = lambda reason: None,
    ) -> None:
        """`bound` is closed by `stop`; `count_rejection` gets a reason of metrics.REJECTIONS.

        Raises ConfigError: a file of TLS can't be used.
        """
        _prepare(bound, config.write_timeout_s)
        self._bound = bound
        self._port = int(bound.getsockname()[1])
        self._context = _context_of(config)
        self._read_timeout_s = config.read_timeout_s
        self._limits = ConnectionLimits(
            max_header_bytes=config.max_header_bytes,
            read_timeout_s=config.read_timeout_s,
            write_timeout_s=config.write_timeout_s,
        )
        self._refusals = refusals = Refusals(count_rejection)
        gate = gated(app, config, keys, refusals, exempt=exempt)
        limited = HeadLimit(
            gate, refusals, max_header_bytes=config.max_header_bytes, grpc_port=grpc_port
        )
        self._uvicorn = _uvicorn_config(RequestIds(limited), config.max_header_bytes)
        self.connections = Connections(config.max_connections)
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        return self._port

    async def start(self) -> None:
        """Raises ConfigError: another process listens at the port since it was bound."""
        listen(self._bound, option="--http-port")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._uvicorn, self.connections, self._limits, self._refusals, loop),
            sock=self._bound,
            ssl=self._context,
            backlog=BACKLOG,
            ssl_handshake_timeout=None if self._context is None else self._read_timeout_s,
        )

    async def stop(self, grace_s: float) -> None:
        """Takes nothing new, lets requests finish for `grace_s`, then cuts what is left."""
        if self._server is not None:
            self._server.close()
        self._bound.close()
        self.connections.close()
        try:
            async with asyncio.timeout(grace_s):
                await self.connections.wait_none_left()
        except TimeoutError:
            logger.info("cuts %d connections", len(self.connections.connections))
            self.connections.cut()
        if not self.connections.tasks:
            return
        _, stuck = await asyncio.wait(self.connections.tasks, timeout=CUT_S)
        if stuck:
            logger.warning("%d requests go on though their clients are gone", len(stuck))


def _prepare(bound: socket.socket, write_timeout_s: float) -> None:
    """Sets what connections inherit: buffers, and how soon the system tells of lost clients."""
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        timeout_ms = round(write_timeout_s * 1000)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


def _uvicorn_config(app: ASGIApp, max_header_bytes: int) -> Config:
    config = Config(
        app,
        http="h11",
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        # It warns of every stranger that speaks no HTTP.
        log_level="error",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE_TIMEOUT_S,
        h11_max_incomplete_event_size=max_header_bytes,
    )
    config.load()
    return config


def _context_of(config: FrontendConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None or config.tls_key is None:  # set together
        return None
    try:
        return tls.public_server_context(config.tls_cert, config.tls_key, config.tls_client_ca)
    except ValueError as error:
        raise ConfigError(f"tls_cert: {error}") from error
