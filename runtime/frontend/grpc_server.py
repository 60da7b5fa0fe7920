"""The gRPC server of a frontend, behind its public port."""

import socket
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos import inference_pb2_grpc
from protos.auth import AioTokenInterceptor, KeyRing
from protos.malformed import AioMalformedInterceptor
from protos.tls import add_port
from runtime.credentials import public_server_credentials
from runtime.errors import ConfigError
from runtime.frontend.grpc_port import GrpcPort, PortLimits
from runtime.frontend.grpc_service import SERVICE, InferenceService
from runtime.frontend.http_refusal import Refusals
from runtime.frontend_config import FrontendConfig

# A Kubernetes probe can't send metadata.
EXEMPT_FROM_KEY = frozenset({f"/{health.SERVICE_NAME}/"})
SERVER_OPTIONS = (
    # Finds out that a client's host is gone, and lets clients find out that we are.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients connect again when they have something to ask for.
    ("grpc.max_connection_idle_ms", 300_000),
)
# Calls beside those that take a slot: health, stats, what is refused.
OTHER_CALLS = 1024
# Clients have so long to close connections that the server has closed.
CLOSE_S = 0.5


class GrpcServer:
    """Serves after `start`."""

    def __init__(
        self,
        bound: socket.socket,
        folder: Path,
        config: FrontendConfig,
        keys: KeyRing,
        refusals: Refusals,
        *,
        http_port: int,
    ) -> None:
        """`bound` is closed by `stop`; `folder` is for the server's socket, and for no other user.

        Raises ConfigError: a file of TLS or the folder can't be used.
        """
        self._reflection = config.reflection
        self._statuses = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[
                AioTokenInterceptor(keys, exempt=EXEMPT_FROM_KEY),
                AioMalformedInterceptor(),
            ],
            # Not by streams of a connection: more would wait at the client, and not be refused.
            maximum_concurrent_rpcs=config.max_requests + OTHER_CALLS,
            options=(
                *SERVER_OPTIONS,
                ("grpc.server_handshake_timeout_ms", round(config.read_timeout_s * 1000)),
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_metadata_size", config.max_header_bytes),
                ("grpc.absolute_max_metadata_size", config.max_header_bytes),
            ),
        )
        path = folder / "socket"
        self._bind(path, config)
        self.port = int(bound.getsockname()[1])
        limits = PortLimits(
            max_connections=config.max_connections,
            read_timeout_s=config.read_timeout_s,
            write_timeout_s=config.write_timeout_s,
        )
        told = wrong_port(http_port, has_tls=config.tls_cert is not None)
        self._port = GrpcPort(bound, path, limits, refusals, told=told)

    async def start(self, service: InferenceService) -> None:
        """Raises ConfigError: another process listens at the port since it was bound."""
        server = self._server
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._statuses, server)
        if self._reflection:
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        for name in (health.OVERALL_HEALTH, SERVICE):
            await self._statuses.set(name, health_pb2.HealthCheckResponse.SERVING)
        await server.start()
        await self._port.start()

    async def set_serving(self, is_serving: bool) -> None:
        """Whether requests can run now; the server as a whole is alive."""
        answers = health_pb2.HealthCheckResponse
        await self._statuses.set(SERVICE, answers.SERVING if is_serving else answers.NOT_SERVING)

    async def set_not_serving(self) -> None:
        """From now on, for good."""
        await self._statuses.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Takes nothing new, lets calls finish for `grace_s`, then cuts what is left."""
        self._port.close()
        await self._server.stop(grace_s)
        await self._port.finish(CLOSE_S)

    def _bind(self, path: Path, config: FrontendConfig) -> None:
        credentials = public_server_credentials(
            config.tls_cert, config.tls_key, config.tls_client_ca
        )
        try:
            add_port(self._server, f"unix:{path}", credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"the gRPC server can't listen at the socket {path}: set TMPDIR to a folder with a "
                "shorter name, where sockets can be made"
            ) from error


def wrong_port(http_port: int, *, has_tls: bool) -> str:
    addition = ", both over TLS" if has_tls else ""
    return f"this is the gRPC port; HTTP is served on port {http_port}{addition}"
