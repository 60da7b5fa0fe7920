"""Groups of two ranks in processes of their own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil

from runtime.cluster.epochs import Epochs
from runtime.cluster.group import WorkerGroup
from runtime.config import EngineConfig
from runtime.executor.grpc_executor import GrpcExecutor
from runtime.scheduling.cache_layout import CacheGroup, CacheLayout
from runtime.scheduling.sampler_inputs import no_inputs
from runtime.scheduling.step_plan import BlockTables, SamplingColumns, StepPlan
from tests.transport import ints

START_S = 60.0
MARK = "LOCKSTEP_TEST_MARK"

OnProgress = Callable[[int, int], None]


@contextmanager
def started(
    model: str, launcher: str, on_progress: OnProgress = lambda loaded, total: None, **options: Any
) -> Iterator[WorkerGroup]:
    config = EngineConfig(
        launcher=launcher,
        tp=2,
        threads_per_rank=1,
        check_ranks=True,
        startup_timeout_s=START_S,
        **options,
    )
    with Epochs(config, model) as epochs:
        epochs.start(on_progress)
        yield epochs.group


def ready_executor(group: WorkerGroup) -> GrpcExecutor:
    layers = tuple(range(len(group.spec.layers)))
    groups = (CacheGroup(layers=layers, window=0),)
    group.allocate_cache(CacheLayout(block_size=4, num_blocks=8, groups=groups, block_bytes=1))
    return group.executor()


def small_plan(step_id: int) -> StepPlan:
    return StepPlan(
        step_id=step_id,
        input_ids=ints(1, 2, 3),
        positions=ints(0, 1, 2),
        sequence_ids=np.array([5], np.uint64),
        seq_lens=ints(0),
        query_lens=ints(3),
        block_tables=(BlockTables(num_blocks=ints(1), first_blocks=ints(0), block_ids=ints(2)),),
        sample_index=ints(2),
        sample_sequence=ints(0),
        sampling=SamplingColumns(
            temperature=np.zeros(1, np.float32),
            top_k=ints(0),
            top_p=np.ones(1, np.float32),
            min_p=np.zeros(1, np.float32),
            seed=np.zeros(1, np.uint64),
            min_length=ints(0),
            presence_penalty=np.zeros(1, np.float32),
            frequency_penalty=np.zeros(1, np.float32),
            repetition_penalty=np.ones(1, np.float32),
            num_logprobs=ints(-1),
        ),
        sampler_inputs=no_inputs(),
        defer_sampling=False,
        score_index=ints(),
        score_token_ids=ints(),
        score_num_tops=ints(),
        block_copies=np.zeros((0, 2), np.int32),
    )


def ranks() -> list[psutil.Process]:
    """The processes of this test that hold a rank."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "workers.server" in child.cmdline() or "WorkerActor" in "".join(child.cmdline())
    ]


def marked(mark: str) -> list[psutil.Process]:
    """The processes that were started with this mark in their environment, whoever's they are."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found
