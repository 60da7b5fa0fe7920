"""The Worker service: one rank's life in one epoch, as RPCs.

It knows nothing of models: `ModelSide` does what the messages ask for, on the device thread.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import grpc

from protos import worker_pb2, worker_pb2_grpc
from protos.malformed import MalformedError
from workers.codec import (
    NotBuiltError,
    StepLimits,
    decode_config,
    decode_layout,
    encode_spec,
    limits_of,
)
from workers.config import CacheLayout, ModelSpec, WorkerConfig
from workers.errors import (
    CacheError,
    ModelError,
    NetworkError,
    OutOfOrderError,
    StepError,
    WorkerError,
)
from workers.lease import Lease
from workers.model_side import Executor, ModelSide, Parallel, Progress
from workers.progress import throttled
from workers.reachability import Reachability
from workers.serial_thread import SerialThread
from workers.step_stream import StepOrder, StepStream

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S = 1.0
MAX_DETAIL_CHARS = 4000


STATUS_BY_ERROR: tuple[tuple[type[WorkerError], grpc.StatusCode], ...] = (
    (NotBuiltError, grpc.StatusCode.UNIMPLEMENTED),
    (StepError, grpc.StatusCode.INVALID_ARGUMENT),
    (OutOfOrderError, grpc.StatusCode.ABORTED),
    (ModelError, grpc.StatusCode.FAILED_PRECONDITION),
    (NetworkError, grpc.StatusCode.FAILED_PRECONDITION),
    (CacheError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (WorkerError, grpc.StatusCode.INTERNAL),
)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """One rank. Sets `stopped` after a Shutdown; tells `on_serving` whether steps can run now.

    `on_claimed` is called with the first call, to whose epoch it belongs from then on, `on_rank`
    when it is known which rank this is. With `first_lease_s` the lease begins with that call, and
    else with the first renewal; `on_expired` is called when its driver has let it run out.
    """

    def __init__(
        self,
        model_side: ModelSide,
        on_serving: Callable[[bool], None],
        on_expired: Callable[[], None],
        on_rank: Callable[[int], None],
        on_claimed: Callable[[], None],
        *,
        first_lease_s: float | None,
    ) -> None:
        self.stopped = threading.Event()
        self._model_side = model_side
        self._on_serving = on_serving
        self._on_rank = on_rank
        self._on_claimed = on_claimed
        self._first_lease_s = first_lease_s
        self._device = SerialThread("device")
        self._lock = threading.Lock()
        self._claims: set[str] = set()
        self._epoch: int | None = None
        self._rank: int | None = None
        self._store: Any = None
        self._parallel: Parallel | None = None
        self._executor: Executor | None = None
        self._limits: StepLimits | None = None
        self._order = StepOrder()
        self._lease = Lease(on_expired)
        self._reachability = Reachability()
        self._fault: str | None = None

    def Listen(
        self, request: worker_pb2.ListenRequest, context: grpc.ServicerContext
    ) -> worker_pb2.ListenReply:
        """Opens a port once."""
        with self._answering(context):
            self._enter(request.epoch)
            self._claim("Listen")
            return self._reachability.listen(request)

    def Reach(
        self, request: worker_pb2.ReachRequest, context: grpc.ServicerContext
    ) -> worker_pb2.ReachReply:
        """Takes as long as the slowest of them."""
        with self._answering(context):
            self._enter(request.epoch)
            return self._reachability.reach(request)

    def OpenRendezvous(
        self, request: worker_pb2.OpenRendezvousRequest, context: grpc.ServicerContext
    ) -> worker_pb2.OpenRendezvousReply:
        """Opens the store once."""
        with self._answering(context):
            self._enter(request.epoch)
            self._claim("OpenRendezvous")
            if request.world_size < 2:
                raise StepError(f"world_size={request.world_size} must be at least 2")
            self._store, port = self._device.run(
                lambda: self._model_side.open_rendezvous(request.world_size)
            )
            return worker_pb2.OpenRendezvousReply(port=port)

    def Initialize(
        self, request: worker_pb2.InitializeRequest, context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.InitializeReply]:
        """Loads once; progress now and then, the spec last."""
        with self._answering(context):
            self._enter(request.epoch)
            config = decode_config(request)
            self._claim("Initialize")
            self._reachability.close()
            self._rank = config.rank
            self._on_rank(config.rank)
            loading = _Running(self._device, lambda progress: self._load(config, progress))
            for loaded, total in loading.reports():
                progress = worker_pb2.LoadProgress(loaded_bytes=loaded, total_bytes=total)
                yield worker_pb2.InitializeReply(progress=progress)
            yield worker_pb2.InitializeReply(spec=encode_spec(loading.result()))

    def AllocateCache(
        self, request: worker_pb2.AllocateCacheRequest, context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.AllocateCacheReply]:
        """Allocates once; after a refusal it may be asked again, with less."""
        with self._answering(context):
            self._enter(request.epoch)
            executor = self._executor
            if executor is None:
                raise OutOfOrderError("AllocateCache came before Initialize was through")
            layout = decode_layout(request, executor.spec)
            self._claim("AllocateCache")
            with self._free_on_failure("AllocateCache"):
                allocating = _Running(
                    self._device, lambda progress: self._allocate(executor, layout, progress)
                )
                for captured, total in allocating.reports():
                    progress = worker_pb2.CaptureProgress(captured=captured, total=total)
                    yield worker_pb2.AllocateCacheReply(progress=progress)
                num_bytes = allocating.result()
            self._limits = limits_of(executor.spec, layout)
            self._on_serving(True)
            yield worker_pb2.AllocateCacheReply(cache_bytes=num_bytes)

    def Execute(
        self, requests: Iterator[worker_pb2.StepRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.StepReply]:
        """One stream at a time. After a step that was refused or failed, no other runs.

        Steps that have come wait for the device, so that it has one to run when another is over.
        """
        with self._answering(context), self._executing(), self._failing_for_good():
            executor, limits = self._executor, self._limits
            if executor is None or limits is None:
                raise OutOfOrderError("a step came before AllocateCache")
            stream = StepStream(
                executor,
                limits,
                self._device,
                self._order,
                check_epoch=self._enter,
                rank=self._rank,
            )
            with stream as steps:
                threading.Thread(
                    target=steps.read, args=(requests,), name="step-reader", daemon=True
                ).start()
                yield from steps.replies()

    def KeepAlive(
        self, request_iterator: Iterator[worker_pb2.LeaseRenewal], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.LeaseRenewal]:
        """Its end isn't the lease's, which runs out by itself."""
        with self._answering(context), self._one_stream("KeepAlive"):
            for renewal in request_iterator:
                self._enter(renewal.epoch)
                if not renewal.lease_ms:
                    raise StepError("lease_ms=0 must be at least 1")
                self._lease.renew(renewal.lease_ms / 1000)
                yield renewal

    def Shutdown(
        self, request: worker_pb2.ShutdownRequest, context: grpc.ServicerContext
    ) -> worker_pb2.ShutdownReply:
        """Answers in little more than CLOSE_TIMEOUT_S, even while a collective hangs."""
        with self._answering(context):
            self._enter(request.epoch)
            self._lease.release()
            self._reachability.close()
            if not context.add_callback(self.stopped.set):
                self.stopped.set()
            leaving = self._device.submit(self._leave)
            try:
                leaving.result(CLOSE_TIMEOUT_S)
            except TimeoutError:
                logger.warning("%s: the device is busy, ending without it", self._name())
            return worker_pb2.ShutdownReply()

    def _load(self, config: WorkerConfig, on_progress: Progress) -> ModelSpec:
        self._parallel = self._model_side.join(config, self._store)
        self._executor = self._model_side.load(config, self._parallel, on_progress)
        return self._executor.spec

    def _allocate(self, executor: Executor, layout: CacheLayout, on_progress: Progress) -> int:
        num_bytes = executor.allocate_cache(layout, on_progress)
        self._model_side.settle()
        return num_bytes

    def _leave(self) -> None:
        if self._parallel is not None:
            self._parallel.close()

    def _name(self) -> str:
        return "worker without a rank" if self._rank is None else f"rank {self._rank}"

    def _enter(self, epoch: int) -> None:
        """A worker lives for one epoch: that of the first call."""
        with self._lock:
            if self._epoch is None:
                self._epoch = epoch
                self._on_claimed()
                if self._first_lease_s is not None:
                    self._lease.renew(self._first_lease_s)
            if self._epoch != epoch:
                raise OutOfOrderError(f"epoch {epoch} came, this worker is of epoch {self._epoch}")

    def _claim(self, name: str) -> None:
        with self._lock:
            if name in self._claims:
                raise OutOfOrderError(f"{name} was called before: a worker does it once")
            self._claims.add(name)

    @contextmanager
    def _free_on_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with self._lock:
                self._claims.discard(name)
            raise

    @contextmanager
    def _executing(self) -> Iterator[None]:
        if self._fault is not None:
            raise OutOfOrderError(f"no step can follow the one that failed: {self._fault}")
        with self._one_stream("Execute"):
            yield

    @contextmanager
    def _one_stream(self, name: str) -> Iterator[None]:
        self._claim(name)
        try:
            yield
        finally:
            with self._lock:
                self._claims.discard(name)

    @contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError:
            raise
        except Exception as error:
            self._fault = self._fault or f"{type(error).__name__}: {error}"
            self._on_serving(False)
            raise

    @contextmanager
    def _answering(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Ends the call with the status of what was raised."""
        try:
            yield
        # The caller has left, and nobody is there to answer; or its message has been found out.
        except (grpc.RpcError, MalformedError):
            raise
        except WorkerError as error:
            code = next(code for kind, code in STATUS_BY_ERROR if isinstance(error, kind))
            context.abort(code, str(error)[:MAX_DETAIL_CHARS])
        except Exception as error:
            logger.exception("%s: a call failed", self._name())
            details = f"{type(error).__name__} on {self._name()}: {error}"
            context.abort(grpc.StatusCode.INTERNAL, details[:MAX_DETAIL_CHARS])


class _Running(Generic[T]):
    """Work on the device thread, and what it tells of its progress."""

    def __init__(self, device: SerialThread, work: Callable[[Progress], T]) -> None:
        self._reports: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._done = device.submit(lambda: work(throttled(self._reports.put)))
        self._done.add_done_callback(lambda _: self._reports.put(None))

    def reports(self) -> Iterator[tuple[int, int]]:
        """Until it is done, or has failed."""
        return iter(self._reports.get, None)

    def result(self) -> T:
        return self._done.result()
