"""Faults on purpose, for tests of what becomes of them: a rank that answers late, or fails.

Nothing here runs unless LOCKSTEP_FAULTS names a folder when a worker loads its model. Whoever can
write to it, the user that the worker runs as and nobody else, can hold up or end a rank's steps,
once for each file that it puts there; what is in a file is a kind and two numbers.
"""

import json
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workers.errors import ModelError

if TYPE_CHECKING:
    import torch

    from workers.batch import Batch, LateInputs
    from workers.config import CacheLayout, ModelSpec, WorkerConfig
    from workers.model_side import Executor, ModelSide, Progress, Timings
    from workers.sampling.sampler import Sampled

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "LOCKSTEP_FAULTS"


class FaultError(Exception):
    """What a forward pass raises on purpose: no error that the worker knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What befalls the next step of one rank that feeds at least `min_tokens`."""

    kind: Literal["late", "raise"]
    seconds: float = 0.0  # that the forward pass begins late
    min_tokens: int = 0


def put_fault(folder: Path, rank: int, fault: Fault) -> Path:
    """Befalls the rank once; the file, whose end tells that it has, is returned."""
    path = folder / f"rank-{rank}"
    written = folder / f".rank-{rank}"
    written.write_text(json.dumps(asdict(fault)), encoding="utf-8")
    return written.rename(path)


def with_faults(model_side: "ModelSide", environment: Mapping[str, str]) -> "ModelSide":
    """As it is where LOCKSTEP_FAULTS isn't set.

    Else its `load` raises ModelError where others may write to the folder.
    """
    name = environment.get(FOLDER_VARIABLE)
    if not name:
        return model_side
    folder = Path(name)
    load = model_side.load

    def load_faulty(config: "WorkerConfig", parallel: Any, on_progress: "Progress") -> "Executor":
        _check_folder(folder)
        logger.warning(
            "%s=%s: rank %d fails on purpose, for tests; unset it for any other use",
            *(FOLDER_VARIABLE, folder, config.rank),
        )
        return FaultyExecutor(load(config, parallel, on_progress), folder / f"rank-{config.rank}")

    return replace(model_side, load=load_faulty)


class FaultyExecutor:
    """Looks before each forward pass whether `path` has a fault for it."""

    def __init__(
        self, executor: "Executor", path: Path, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._executor = executor
        self._path = path
        self._sleep = sleep

    @property
    def spec(self) -> "ModelSpec":
        return self._executor.spec

    @property
    def timings(self) -> "Timings":
        return self._executor.timings

    def allocate_cache(self, layout: "CacheLayout", on_progress: "Progress") -> int:
        return self._executor.allocate_cache(layout, on_progress)

    def forward(self, batch: "Batch") -> "torch.Tensor":
        """Raises FaultError: that is the fault."""
        fault = self._take(len(batch.input_ids))
        if fault is not None:
            logger.warning("on purpose: %s", fault)
            if fault.kind == "raise":
                raise FaultError(f"{FOLDER_VARIABLE} asks for a step that fails")
            self._sleep(fault.seconds)
        return self._executor.forward(batch)

    def sample(self, late: "LateInputs | None" = None) -> "Sampled | None":
        return self._executor.sample(late)

    def _take(self, num_tokens: int) -> Fault | None:
        """Once: the file goes first."""
        try:
            fault = Fault(**json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        if num_tokens < fault.min_tokens:
            return None
        self._path.unlink()
        return fault


def _check_folder(folder: Path) -> None:
    try:
        status = folder.stat()
    except OSError as error:
        raise ModelError(f"{FOLDER_VARIABLE}={folder} can't be used: {error}") from error
    is_ours = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not (stat.S_ISDIR(status.st_mode) and is_ours):
        raise ModelError(
            f"{FOLDER_VARIABLE}={folder} must be a folder that nobody but the worker's user can "
            "write to, since a file there ends a rank's steps: chmod 700, or unset it"
        )
