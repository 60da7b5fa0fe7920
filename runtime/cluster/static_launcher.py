"""Workers that something else starts, and starts again, at addresses that the operator gives."""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.auth import bearer
from protos.tls import explain, open_channel
from runtime.cluster.base import OnDeath, WorkerAddress
from runtime.cluster.worker_client import CHANNEL_OPTIONS
from runtime.cluster.worker_command import TOKEN_VARIABLE
from runtime.config import EngineConfig, require_key
from runtime.credentials import cluster_channel_credentials
from runtime.errors import ConfigError, WorkerError
from workers.server import FIRST_LEASE_S, UNCLAIMED_NAME

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2
CHECK_TIMEOUT_S = 2.0
# After this, and then again and again, the user is told what is waited for.
PATIENCE_S = 5.0
# A worker whose lease has run out takes so long, on a busy machine, to be gone.
END_GRACE_S = 5.0

WHO_STARTS = "what starts them has to start new ones, Lockstep doesn't"

PROBE_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class StaticCluster:
    """Addresses that stay, at which a new worker serves for each epoch.

    All workers of all epochs have one token, the operator's.
    """

    def __init__(self, config: EngineConfig, *, token: str) -> None:
        require_key(TOKEN_VARIABLE, token)
        self._token = token
        self._addresses = [_address(rank, each) for rank, each in enumerate(config.worker_list)]
        self._credentials = cluster_channel_credentials(config.cluster_certs)
        self._startup_timeout_s = config.startup_timeout_s
        self._lease_s = config.lease_s

    def token(self) -> str:
        """As Cluster.token."""
        return self._token

    def prepare(self, count: int) -> None:
        """As Cluster.prepare: there is nothing to start."""

    def launcher(self, token: str) -> "StaticLauncher":
        """As Cluster.launcher."""
        return StaticLauncher(
            self._addresses,
            token=token,
            startup_timeout_s=self._startup_timeout_s,
            longest_claim_s=max(self._lease_s, FIRST_LEASE_S) + END_GRACE_S,
            credentials=self._credentials,
        )

    def close(self) -> None:
        """As Cluster.close: nothing is left."""


class StaticLauncher:
    """Waits until a worker serves at each address that no driver has.

    Workers of an epoch that is over are waited for as those that aren't there. One that another
    driver has for longer than `longest_claim_s` is its driver's, which lives and renews its lease.
    """

    ends_workers = False

    def __init__(
        self,
        addresses: Sequence[WorkerAddress],
        *,
        token: str,
        startup_timeout_s: float,
        longest_claim_s: float,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._addresses = addresses
        self._token = token
        self._startup_timeout_s = startup_timeout_s
        self._longest_claim_s = longest_claim_s
        self._credentials = credentials
        self._closing = threading.Event()

    def launch(self, count: int) -> list[WorkerAddress]:
        """As Launcher.launch; hosts are nodes. Raises ConfigError: something else serves there."""
        assert count == len(self._addresses), "EngineConfig has an address for each rank"
        begun = time.monotonic()
        told = begun
        with ExitStack() as stack:
            probes = [stack.enter_context(closing(self._probe(each))) for each in self._addresses]
            while lacks := _look(probes):
                now = time.monotonic()
                if now - begun >= self._startup_timeout_s:
                    raise WorkerError(
                        f"after startup_timeout_s={self._startup_timeout_s:g} {lacks}: {WHO_STARTS}"
                    )
                if now - told >= PATIENCE_S:
                    logger.warning("waiting for workers: %s: %s", lacks, WHO_STARTS)
                    told = now
                if self._closing.wait(POLL_INTERVAL_S):
                    raise WorkerError("the launcher was closed while it waited for workers")
        return list(self._addresses)

    def watch(self, on_death: OnDeath) -> None:
        """As Launcher.watch: of their ends only broken streams and silence tell."""

    def close(self, *, at_once: bool = False) -> None:
        """As Launcher.close, but that it ends no worker."""
        self._closing.set()

    def _probe(self, address: WorkerAddress) -> "_Probe":
        return _Probe(
            address,
            token=self._token,
            longest_claim_s=self._longest_claim_s,
            credentials=self._credentials,
        )


class _Probe:
    """Asks at one address whether the worker there is to be had."""

    def __init__(
        self,
        address: WorkerAddress,
        *,
        token: str,
        longest_claim_s: float,
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        self._name = f"rank {address.rank} at {address.target}"
        self._metadata = bearer(token)
        self._longest_claim_s = longest_claim_s
        self._claimed_at: float | None = None
        self._channel = open_channel(address.target, PROBE_OPTIONS, credentials)
        self._stub = health_pb2_grpc.HealthStub(self._channel)

    def ask(self) -> Any:
        """Starts the call whose outcome `lack` reads."""
        request = health_pb2.HealthCheckRequest(service=UNCLAIMED_NAME)
        return self._stub.Check.future(request, timeout=CHECK_TIMEOUT_S, metadata=self._metadata)

    def lack(self, call: Any) -> str | None:
        """What keeps the worker from us, None where nothing does.

        Raises ConfigError: waiting won't help.
        """
        error = call.exception()
        if error is not None:
            self._claimed_at = None
            return f"{self._name} {self._describe(error)}"
        if call.result().status == health_pb2.HealthCheckResponse.SERVING:
            return None
        now = time.monotonic()
        self._claimed_at = self._claimed_at or now
        if now - self._claimed_at >= self._longest_claim_s:
            raise ConfigError(
                f"{self._name} has been another driver's for {self._longest_claim_s:g} s: that one "
                "lives and renews its lease; end it, or take other workers"
            )
        return f"{self._name} belongs to another driver, or to an epoch whose lease isn't over"

    def close(self) -> None:
        self._channel.close()

    def _describe(self, error: grpc.RpcError) -> str:
        code, details = error.code(), explain(error.details() or "")
        match code:
            case grpc.StatusCode.UNAVAILABLE:
                return f"isn't there ({details})"
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"doesn't answer within {CHECK_TIMEOUT_S:g} s"
            case grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError(
                    f"{self._name} asks for another token: {TOKEN_VARIABLE} must be the same for "
                    "the driver and its workers"
                )
            case grpc.StatusCode.NOT_FOUND | grpc.StatusCode.UNIMPLEMENTED:
                raise ConfigError(f"{self._name} is no worker of this version of Lockstep")
        return f"fails: {code.name}: {details}"


def _look(probes: Sequence[_Probe]) -> str:
    """What is lacking, "" where nothing is. Raises ConfigError: it will be for good."""
    calls = [(probe, probe.ask()) for probe in probes]
    return "; ".join(lack for probe, call in calls if (lack := probe.lack(call)) is not None)


def _address(rank: int, text: str) -> WorkerAddress:
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    return WorkerAddress(rank=rank, node=host, host=host, port=int(port))
