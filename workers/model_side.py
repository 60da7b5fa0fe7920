"""What the Worker service needs of the model code, and the place where a test puts its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from workers.batch import Batch, LateInputs
from workers.config import CacheLayout, ModelSpec, WorkerConfig
from workers.sampling.sampler import Sampled

Progress = Callable[[int, int], None]


class Parallel(Protocol):
    """Membership in the process group."""

    def close(self) -> None: ...


class Timings(Protocol):
    """Microseconds of the last step."""

    @property
    def forward_us(self) -> int: ...

    @property
    def sample_us(self) -> int: ...


class Executor(Protocol):
    """The loaded model of this rank."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def timings(self) -> Timings: ...

    def allocate_cache(self, layout: CacheLayout, on_progress: Progress) -> int: ...

    def forward(self, batch: Batch) -> torch.Tensor: ...

    def sample(self, late: LateInputs | None = None) -> Sampled | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSide:
    """What the service needs of the model code; all of it is called on the device thread."""

    open_rendezvous: Callable[[int], tuple[Any, int]]  # ranks -> (store, port)
    join: Callable[[WorkerConfig, Any], Parallel]  # config, store or None
    load: Callable[[WorkerConfig, Any, Progress], Executor]  # config, what join gave, progress
    settle: Callable[[], None]  # model and cache are there, the first step comes next
