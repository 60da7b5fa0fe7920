"""The ranks of one epoch: their start, and what the driver holds of them afterwards."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from protos import worker_pb2
from runtime.cluster.base import Death, Launcher, WorkerAddress
from runtime.cluster.heartbeat import Heartbeat
from runtime.cluster.loaded_model import LoadedModel, loaded_model
from runtime.cluster.reachability import Place, find_places
from runtime.cluster.worker_client import AllocateReply, Reply, WorkerClient
from runtime.config import EngineConfig
from runtime.credentials import cluster_channel_credentials
from runtime.errors import ConfigError, LockstepError, WorkerError
from runtime.executor.deadlines import StepDeadlines
from runtime.executor.grpc_executor import GrpcExecutor
from runtime.scheduling.cache_layout import CacheLayout

__all__ = ["LoadedModel", "WorkerGroup", "start_workers"]

logger = logging.getLogger(__name__)

# A rank that lost its peer, or a broken connection, may be known before the end that caused it.
DEATH_GRACE_S = 1.0

# Bytes loaded and to load, of all ranks; or graphs captured and to capture, of one.
OnProgress = Callable[[int, int], None]
# A rank that waits for another in a collective ends by itself before the driver's deadline for the
# step, and tells what it waited for.
COLLECTIVE_SHARE = 0.9
DEFAULT_GPU_MEMORY_FRACTION = 0.9


def ignore(done: int, total: int) -> None:
    """Hears of progress that nobody watches."""


def start_workers(
    launcher: Launcher,
    config: EngineConfig,
    model_path: str,
    *,
    token: str,
    epoch: int,
    on_progress: OnProgress,
) -> "WorkerGroup":
    """Starts `config.tp` workers and loads the model in `model_path`, a folder on every node.

    `launcher` starts workers that ask for `token`.
    Raises ConfigError: the model or the options can't be served, in the worker's words. Raises
    WorkerError: a rank died, hung past startup_timeout_s, or loaded another model than the others.
    On any error, an interrupt included, everything that was started is ended again.
    """
    credentials = cluster_channel_credentials(config.cluster_certs)
    deadline = time.monotonic() + config.startup_timeout_s
    with ExitStack() as stack:
        stack.callback(launcher.close)
        addresses = launcher.launch(config.tp)
        clients = [
            WorkerClient(each, token=token, epoch=epoch, credentials=credentials)
            for each in addresses
        ]
        group = WorkerGroup(config, launcher, clients, token=token, epoch=epoch)
        stack.callback(group.close)
        group.load(model_path, deadline, on_progress)
        stack.pop_all()
        return group


class WorkerGroup:
    """Workers that have loaded one model. `close` ends them, as does leaving it as a context."""

    def __init__(
        self,
        config: EngineConfig,
        launcher: Launcher,
        clients: Sequence[WorkerClient],
        *,
        token: str,
        epoch: int,
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._clients = clients
        self._addresses = [client.address for client in clients]
        self._token = token
        self._epoch = epoch
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._cleanup = ExitStack()  # what `close` does, last first
        self._cleanup.callback(launcher.close)
        for client in self._clients:
            self._cleanup.callback(client.close)
        self._heartbeat = Heartbeat(clients, lease_s=config.lease_s, on_silent=self._on_silent)
        self._cleanup.callback(self._heartbeat.close)
        self._farewell = self._cleanup.enter_context(ExitStack())
        self._farewell.callback(self._ask_to_shut_down)
        self._has_lost = False
        self._lost: Future[Death] = Future()  # the first
        self._spec: LoadedModel | None = None

    @property
    def spec(self) -> LoadedModel:
        """What the ranks have loaded."""
        if self._spec is None:
            raise RuntimeError("spec was asked for before load")
        return self._spec

    def load(self, model_path: str, deadline: float, on_progress: OnProgress) -> None:
        """Has the ranks find each other and load; called once, by start_workers."""
        replies: SimpleQueue[tuple[int, Reply]] = SimpleQueue()
        self._launcher.watch(self._on_death)
        self._heartbeat.start()
        self.on_lost(lambda error: replies.put((-1, error)))
        try:
            port = 0
            places = [Place("", "")]
            if self._config.tp > 1:
                places = find_places(
                    self._clients,
                    interface=self._config.interface or "",
                    device=self._config.device,
                    timeout_s=_remaining(deadline),
                )
                port = self._clients[0].open_rendezvous(self._config.tp, _remaining(deadline))
            for client, place in zip(self._clients, places, strict=True):
                request = self._initialize_request(client.address, place, model_path, port)
                client.initialize(request, lambda rank, reply: replies.put((rank, reply)))
            self._spec = loaded_model(self._collect_specs(replies, deadline, on_progress))
        except LockstepError as error:
            self._raise_death_behind(error)
            raise

    def allocate_cache(self, layout: CacheLayout, on_progress: OnProgress = ignore) -> None:
        """Allocates the KV cache on every rank; `on_progress` hears of rank 0's CUDA graphs.

        Raises ConfigError: it doesn't fit on a rank. Raises WorkerError: a rank died or was late.
        """
        request = worker_pb2.AllocateCacheRequest(
            epoch=self._epoch,
            block_size=layout.block_size,
            num_blocks=layout.num_blocks,
            groups=[worker_pb2.CacheGroup(layers=group.layers) for group in layout.groups],
        )
        timeout_s = self._config.startup_timeout_s
        replies: SimpleQueue[tuple[int, AllocateReply]] = SimpleQueue()
        self.on_lost(lambda error: replies.put((-1, error)))
        for client in self._clients:
            client.allocate_cache(
                request, timeout_s, lambda rank, reply: replies.put((rank, reply))
            )
        waiting = {client.address.rank for client in self._clients}
        try:
            # The first error ends the wait: the other ranks may wait for that one, for good.
            while waiting:
                rank, reply = replies.get()
                if isinstance(reply, LockstepError):
                    raise reply
                if reply.HasField("cache_bytes"):
                    waiting.discard(rank)
                elif rank == 0:
                    on_progress(reply.progress.captured, reply.progress.total)
        except LockstepError as error:
            self._raise_death_behind(error)
            raise

    def executor(self, deadlines: StepDeadlines | None = None) -> GrpcExecutor:
        """Runs steps on the ranks, by deadlines that know earlier epochs.

        Its `close` ends its streams; this group's ends the ranks.
        """
        executor = GrpcExecutor(
            [client.channel for client in self._clients],
            token=self._token,
            epoch=self._epoch,
            deadlines=deadlines or StepDeadlines(self._config.step_timeout_s),
            check_ranks=self._config.check_ranks,
            share_samples=self._config.pipeline_depth > 1,
            check_deltas=self._config.check_deltas,
            on_broken=self._on_broken,
        )
        self._cleanup.callback(executor.close)
        self._lost.add_done_callback(lambda lost: executor.fail(*lost.result()[:2]))
        self._heartbeat.watch()
        return executor

    def on_lost(self, callback: Callable[[WorkerError], None]) -> None:
        """Calls `callback` once a rank died, also while no step runs; from any thread.

        At once where one has died already; never for ranks that `close` ends.
        """
        self._lost.add_done_callback(lambda lost: callback(self._describe(lost.result())))

    def find_cause(self, error: WorkerError) -> WorkerError:
        """The death of a rank behind what was noticed first, if there is one."""
        try:
            return self._describe(self._lost.result(DEATH_GRACE_S))
        except TimeoutError:
            return error

    def close(self) -> None:
        """Ends everything in a few seconds. May be called twice."""
        self._closing.set()
        self._cleanup.close()

    def kill(self) -> None:
        """As `close`, for ranks that are lost: none is asked to leave, which may take its time.

        But for those that nobody here can end: they are asked.
        """
        if self._launcher.ends_workers:
            self._farewell.pop_all()
        self._closing.set()
        self._launcher.close(at_once=True)
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _initialize_request(
        self, address: WorkerAddress, place: Place, model_path: str, rendezvous_port: int
    ) -> worker_pb2.InitializeRequest:
        config = self._config
        return worker_pb2.InitializeRequest(
            epoch=self._epoch,
            rank=address.rank,
            tp_size=config.tp,
            rendezvous_host=self._addresses[0].host,
            rendezvous_port=rendezvous_port,
            interface=place.interface,
            address=place.address,
            model_path=model_path,
            dtype=config.dtype,
            device=config.device,
            attention=config.attention,
            deterministic=config.deterministic,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
            num_threads=config.threads_per_rank,
            local_world_size=sum(other.node == address.node for other in self._addresses),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_num_scored_tokens=config.max_num_scored_tokens,
            gpu_memory_fraction=config.gpu_memory_fraction or DEFAULT_GPU_MEMORY_FRACTION,
            enforce_eager=config.enforce_eager,
            collective_timeout_s=COLLECTIVE_SHARE * config.step_timeout_s,
        )

    def _collect_specs(
        self, replies: "SimpleQueue[tuple[int, Reply]]", deadline: float, on_progress: OnProgress
    ) -> list[worker_pb2.ModelSpec]:
        specs: dict[int, worker_pb2.ModelSpec] = {}
        progress: dict[int, worker_pb2.LoadProgress] = {}
        ranks = range(len(self._clients))
        while len(specs) < len(ranks):
            try:
                rank, reply = replies.get(timeout=_remaining(deadline))
            except Empty:
                late = ", ".join(str(rank) for rank in ranks if rank not in specs)
                raise WorkerError(
                    f"rank {late} did not load the model within "
                    f"startup_timeout_s={self._config.startup_timeout_s:g}"
                ) from None
            if isinstance(reply, LockstepError):
                raise reply
            if reply.HasField("spec"):
                specs[rank] = reply.spec
                continue
            progress[rank] = reply.progress
            # Not before all have told their share: the total would grow under the user's eyes.
            if len(progress) == len(ranks):
                on_progress(
                    sum(each.loaded_bytes for each in progress.values()),
                    sum(each.total_bytes for each in progress.values()),
                )
        return [specs[rank] for rank in ranks]

    def _on_death(self, death: Death) -> None:
        with self._lock:
            if self._closing.is_set() or self._has_lost:
                return
            self._has_lost = True
        logger.error("%s", self._describe(death))
        self._lost.set_result(death)

    def _on_silent(self, rank: int, cause: str) -> None:
        self._on_death(Death(rank, cause))

    def _on_broken(self, rank: int, cause: str) -> None:
        """A rank whose stream broke is lost, also while no step runs and it seems to live."""
        try:
            self._lost.result(DEATH_GRACE_S)  # the end behind it, if it is one, says more
        except TimeoutError:
            self._on_death(Death(rank, f"its stream broke: {cause}"))

    def _raise_death_behind(self, error: LockstepError) -> None:
        """Raises the death of a rank instead of what followed from it.

        That may look like a fault of the model, where the others miss their peer in the middle.
        """
        if isinstance(error, ConfigError) and len(self._clients) == 1:
            return
        try:
            death = self._lost.result(DEATH_GRACE_S)
        except TimeoutError:
            return
        raise self._describe(death)

    def _describe(self, death: Death) -> WorkerError:
        address = self._addresses[death.rank]
        return WorkerError(
            f"rank {death.rank} on {address.host} is gone: {death.cause}",
            is_outside=death.is_outside,
        )

    def _ask_to_shut_down(self) -> None:
        for client, future in [(client, client.shutdown()) for client in self._clients]:
            error = future.exception()  # the call has a deadline of its own
            if error is not None:
                # It may be dead already; the launcher ends it in any case.
                logger.debug("rank %d did not shut down: %s", client.address.rank, error.code())


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
