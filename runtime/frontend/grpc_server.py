"""The public gRPC port of a frontend."""

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
from runtime.frontend.grpc_service import SERVICE, InferenceService
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


class GrpcServer:
    """Bound when it is made, serving after `start`.

    Raises ConfigError: the port can't be bound, or a file of TLS can't be used.
    """

    def __init__(self, config: FrontendConfig, keys: KeyRing, *, reuse_port: bool) -> None:
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
                ("grpc.max_allowed_incoming_connections", config.max_connections),
                ("grpc.server_handshake_timeout_ms", round(config.read_timeout_s * 1000)),
                ("grpc.so_reuseport", int(reuse_port)),
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_metadata_size", config.max_header_bytes),
                ("grpc.absolute_max_metadata_size", config.max_header_bytes),
            ),
        )
        self.port = self._bind(config)

    async def start(self, service: InferenceService) -> None:
        server = self._server
        inference_pb2_grpc.add_InferenceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._statuses, server)
        if self._reflection:
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        for name in (health.OVERALL_HEALTH, SERVICE):
            await self._statuses.set(name, health_pb2.HealthCheckResponse.SERVING)
        await server.start()

    async def set_serving(self, is_serving: bool) -> None:
        """Whether requests can run now; the server as a whole is alive."""
        answers = health_pb2.HealthCheckResponse
        await self._statuses.set(SERVICE, answers.SERVING if is_serving else answers.NOT_SERVING)

    async def set_not_serving(self) -> None:
        """From now on, for good."""
        await self._statuses.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)

    def _bind(self, config: FrontendConfig) -> int:
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.port}"
        credentials = public_server_credentials(
            config.tls_cert, config.tls_key, config.tls_client_ca
        )
        try:
            return add_port(self._server, address, credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"can't listen at {address}: it is in use, or no address of this machine; "
                "set --port or --host"
            ) from error
