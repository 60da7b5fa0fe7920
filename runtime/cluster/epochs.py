"""The worker groups of one engine, one after the other."""

import logging
import secrets
import threading
from dataclasses import replace
from types import TracebackType
from typing import Self

from runtime.cluster.base import Launcher  # noqa: TC001
from runtime.cluster.clusters import open_cluster
from runtime.cluster.group import OnProgress, WorkerGroup, ignore, start_workers
from runtime.cluster.loaded_model import LoadedModel
from runtime.config import EngineConfig
from runtime.errors import ConfigError, WorkerError
from runtime.executor.deadlines import StepDeadlines
from runtime.executor.grpc_executor import GrpcExecutor
from runtime.scheduling.cache_layout import CacheLayout

logger = logging.getLogger(__name__)

EPOCH_BITS = 63  # a number takes 64 on the wire


class Epochs:
    """Each has workers and a number of its own; the cluster they run on stays.

    `close` ends everything, as does leaving it as a context.
    """

    def __init__(self, config: EngineConfig, model_path: str) -> None:
        self._config = config
        self._model_path = model_path
        self._cluster = open_cluster(config)
        self._deadlines = StepDeadlines(config.step_timeout_s)
        self._starting = threading.Lock()  # held while a group is started
        self._lock = threading.Lock()
        self._is_closed = False
        self._launcher: Launcher | None = None
        # From anywhere: workers that another driver has, or an earlier run of ours had, are to take
        # nothing from this one.
        self._epoch = secrets.randbits(EPOCH_BITS)
        self._spec: LoadedModel | None = None
        self._layout: CacheLayout | None = None
        self._group: WorkerGroup | None = None

    @property
    def group(self) -> WorkerGroup:
        """The workers of this epoch."""
        if self._group is None:
            raise RuntimeError("the group was asked for before the start")
        return self._group

    def start(self, on_progress: OnProgress) -> LoadedModel:
        """Starts the first epoch, which has no cache yet. As `start_workers`."""
        with self._starting:
            self._group = self._start_group(on_progress)
            self._spec = self._group.spec
        return self._spec

    def allocate_cache(self, layout: CacheLayout, on_progress: OnProgress = ignore) -> None:
        """In this epoch, and in those to come. As `WorkerGroup.allocate_cache`."""
        self.group.allocate_cache(layout, on_progress)
        self._layout = layout

    def executor(self) -> GrpcExecutor:
        """Runs the steps of this epoch."""
        return self.group.executor(self._deadlines)

    def prepare(self) -> None:
        """Has spare workers start for the next epoch, where the options want them."""
        with self._lock:
            if self._config.standby and not self._is_closed:
                self._cluster.prepare(self._config.tp)

    def find_cause(self, error: WorkerError) -> WorkerError:
        """What ended this epoch, `error` being what was noticed of it."""
        return self.group.find_cause(error)

    def restart(self) -> None:
        """Ends the epoch and starts the next, with the same model and cache.

        Raises what `start` and `allocate_cache` do; it may be called again. Raises WorkerError:
        another thread has called `close`.
        """
        with self._starting:
            self.group.kill()
            group = self._start_group(ignore)
            try:
                self._check_same(group.spec)
                assert self._layout is not None, "the first epoch has no cache"
                group.allocate_cache(self._layout)
            except BaseException:
                group.close()
                raise
            self._group = group

    def close(self) -> None:
        """From any thread; ends a start that is under way. May be called twice."""
        with self._lock:
            self._is_closed = True
            launcher = self._launcher
        if launcher is not None:
            launcher.close()
        with self._starting:
            if self._group is not None:
                self._group.close()
            self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start_group(self, on_progress: OnProgress) -> WorkerGroup:
        with self._lock:
            if self._is_closed:
                raise WorkerError("the engine is stopping: no workers are started")
            token = self._cluster.token()
            self._launcher = launcher = self._cluster.launcher(token)
        self._epoch += 1
        return start_workers(
            launcher,
            self._config,
            self._model_path,
            token=token,
            epoch=self._epoch,
            on_progress=on_progress,
        )

    def _check_same(self, spec: LoadedModel) -> None:
        assert self._spec is not None
        memory = self._spec.available_memory_bytes
        if replace(spec, available_memory_bytes=memory) != self._spec:
            raise ConfigError(
                f"the files in {self._model_path} are of another model than at the start: "
                "put them back, or start the engine anew"
            )
