"""The driver's end of one worker's service, but for the steps."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from protos import worker_pb2, worker_pb2_grpc
from protos.auth import bearer
from protos.tls import explain, open_channel
from runtime.cluster.base import WorkerAddress
from runtime.errors import ConfigError, LockstepError, WorkerError

SHUTDOWN_TIMEOUT_S = 2.0

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # An idle node that is lost closes no connection: only unanswered pings tell of it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Workers are reached directly, whatever the environment says of proxies.
    ("grpc.enable_http_proxy", 0),
)

# What the operator can change, by the worker's words; any other status is a fault of the worker.
CONFIG_STATUSES = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED)

UNREACHED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

Call = Callable[[], Any]  # waits for the reply, and raises what came of it instead
Reply = worker_pb2.InitializeReply | LockstepError
AllocateReply = worker_pb2.AllocateCacheReply | LockstepError


class WorkerClient:
    """One rank of an epoch.

    Its errors are ConfigError, in the worker's words, for what the operator can change, else
    WorkerError with rank, call, status and the worker's words.
    """

    def __init__(
        self,
        address: WorkerAddress,
        *,
        token: str,
        epoch: int,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        self.channel = open_channel(address.target, CHANNEL_OPTIONS, credentials)
        self._epoch = epoch
        self._metadata = bearer(token)
        self._stub = worker_pb2_grpc.WorkerStub(self.channel)  # type: ignore[no-untyped-call]

    def listen(self, *, interface: str, device: str, timeout_s: float) -> Call:
        """Starts the call; what is returned waits for the worker's ListenReply.

        As it is the first call to a worker, its error tells whether the driver reaches it.
        """
        request = worker_pb2.ListenRequest(
            epoch=self._epoch, host=self.address.host, interface=interface, device=device
        )
        call = self._stub.Listen.future(request, timeout=timeout_s, metadata=self._metadata)

        def wait() -> worker_pb2.ListenReply:
            try:
                reply: worker_pb2.ListenReply = call.result()
                return reply
            except grpc.RpcError as error:
                if error.code() not in UNREACHED:
                    raise self._translated("Listen", error) from error
                raise WorkerError(
                    f"the driver can't reach rank {self.address.rank} on node "
                    f"{self.address.host} at {self.address.target}: {error.details()}",
                    is_outside=True,
                ) from error

        return wait

    def reach(
        self, endpoints: Sequence[worker_pb2.Endpoint], *, each_s: float, timeout_s: float
    ) -> Call:
        """Starts the call; what is returned waits for the worker's ReachReply."""
        request = worker_pb2.ReachRequest(
            epoch=self._epoch, endpoints=endpoints, timeout_ms=round(1000 * each_s)
        )
        call = self._stub.Reach.future(request, timeout=timeout_s, metadata=self._metadata)
        return lambda: self._outcome("Reach", call)

    def open_rendezvous(self, world_size: int, timeout_s: float) -> int:
        """Returns the store's port."""
        request = worker_pb2.OpenRendezvousRequest(epoch=self._epoch, world_size=world_size)
        try:
            reply = self._stub.OpenRendezvous(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translated("OpenRendezvous", error) from error
        return int(reply.port)

    def initialize(
        self, request: worker_pb2.InitializeRequest, on_reply: Callable[[int, Reply], None]
    ) -> None:
        """Calls `on_reply` with the rank for each reply, or for the error that ends them.

        From a thread of its own; returns at once.
        """
        call = self._stub.Initialize(request, metadata=self._metadata)
        self._read("Initialize", call, on_reply)

    def allocate_cache(
        self,
        request: worker_pb2.AllocateCacheRequest,
        timeout_s: float,
        on_reply: Callable[[int, AllocateReply], None],
    ) -> None:
        """As `initialize`."""
        call = self._stub.AllocateCache(request, timeout=timeout_s, metadata=self._metadata)
        self._read("AllocateCache", call, on_reply)

    def keep_alive(self, renewals: Iterator[worker_pb2.LeaseRenewal]) -> Any:
        """Starts the call, which brings each renewal back."""
        return self._stub.KeepAlive(renewals, metadata=self._metadata)

    def renewal(self, number: int, lease_ms: int) -> worker_pb2.LeaseRenewal:
        return worker_pb2.LeaseRenewal(epoch=self._epoch, number=number, lease_ms=lease_ms)

    def shutdown(self) -> Any:
        """Starts the call; the future has an exception where the worker didn't answer in time."""
        request = worker_pb2.ShutdownRequest(epoch=self._epoch)
        return self._stub.Shutdown.future(
            request, timeout=SHUTDOWN_TIMEOUT_S, metadata=self._metadata
        )

    def close(self) -> None:
        """Ends the calls that still run."""
        self.channel.close()

    def _read(self, name: str, call: Any, on_reply: Callable[[int, Any], None]) -> None:
        """From a thread of its own; returns at once."""

        def read() -> None:
            try:
                for reply in call:
                    on_reply(self.address.rank, reply)
            except grpc.RpcError as error:
                on_reply(self.address.rank, self._translated(name, error))

        thread = f"rank-{self.address.rank}-{name.lower()}"
        threading.Thread(target=read, name=thread, daemon=True).start()

    def _outcome(self, name: str, call: Any) -> Any:
        try:
            return call.result()
        except grpc.RpcError as error:
            raise self._translated(name, error) from error

    def _translated(self, call: str, error: grpc.RpcError) -> LockstepError:
        code, details = error.code(), explain(error.details() or "")
        if code in CONFIG_STATUSES:
            return ConfigError(details)
        return WorkerError(f"rank {self.address.rank} failed in {call}: {code.name}: {details}")
