"""A rank whose model takes its time and computes nothing; all else is a worker's own."""

import os
import threading
from collections import deque
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter, sleep
from typing import NamedTuple

import torch

from benchmarks.overhead.cases import MAX_MODEL_LEN, VOCAB_SIZE
from benchmarks.overhead.child import next_message
from benchmarks.overhead.figures import StepTimes
from workers.batch import Batch, LateInputs
from workers.collector import freeze_heap
from workers.config import CacheLayout, LayerCacheSpec, ModelSpec, WorkerConfig
from workers.model_executor import StepTimings
from workers.model_side import ModelSide, Progress
from workers.parallel import TensorParallel, join, open_rendezvous
from workers.sampling.logprobs import Logprobs
from workers.sampling.sampler import Sampled, Samples
from workers.server import serve
from workers.shared_samples import SharedSamples

HOST = "127.0.0.1"
MEMORY_BYTES = 1 << 40
EOS = 0  # never sampled
FIRST_LETTER, NUM_LETTERS = 97, 26
NUM_KEPT_STEPS = 100_000

LAYER = LayerCacheSpec(window=0, num_kv_heads=1, k_dim=1, v_dim=1, element_bytes=1)
SPEC = ModelSpec(
    architecture="Sleeper",
    vocab_size=VOCAB_SIZE,
    max_model_len=MAX_MODEL_LEN,
    eos_token_ids=(EOS,),
    layers=(LAYER,),
    available_memory_bytes=MEMORY_BYTES,
    block_size_multiple=1,
    parameter_bytes=1,
    attention="none",
)
NO_LOGPROBS = Logprobs(
    rows=torch.zeros(0, dtype=torch.int64),
    logprobs=torch.zeros(0),
    num_tops=torch.zeros(0, dtype=torch.int64),
    top_token_ids=torch.zeros(0, 0, dtype=torch.int64),
    top_logprobs=torch.zeros(0, 0),
)


class Pace:
    """How long steps take from now on."""

    def __init__(self) -> None:
        self.step_s = 0.001


class Sleeper:
    """Runs each step by waiting for its end."""

    spec = SPEC

    def __init__(
        self,
        pace: Pace,
        steps: "deque[StepTimes]",
        config: WorkerConfig,
        parallel: TensorParallel,
        on_progress: Progress,
    ) -> None:
        torch.set_num_threads(1)
        self.timings = StepTimings(0, 0)
        self._pace = pace
        self._steps = steps
        self._parallel = parallel
        self._shared = SharedSamples(parallel)
        self._running: tuple[Batch, float, float] | None = None

    def allocate_cache(self, layout: CacheLayout, on_progress: Progress) -> int:
        return 1

    def forward(self, batch: Batch) -> torch.Tensor:
        started = perf_counter()
        due = started + self._pace.step_s
        input_ids = self._shared.resolve(batch, batch.input_ids)
        self._running = (batch, started, due)
        sleep(max(0.0, due - perf_counter()))
        self.timings = StepTimings(int((perf_counter() - started) * 1e6), 0)
        return input_ids

    def sample(self, late: LateInputs | None = None) -> Sampled | None:
        assert self._running is not None, "sample comes after forward"
        (batch, started, due), self._running = self._running, None
        num_rows = len(batch.sample_index)
        token_ids = FIRST_LETTER + (torch.arange(num_rows) + batch.step_id) % NUM_LETTERS
        self._shared.share(batch, token_ids if self._parallel.is_sampler else None)
        self._steps.append(StepTimes(batch.step_id, started, due, perf_counter()))
        if not self._parallel.is_sampler:
            return None
        faults = torch.zeros(num_rows, dtype=torch.uint8)
        samples = Samples(token_ids=token_ids, faults=faults, logprobs=NO_LOGPROBS)
        return lambda: (samples, NO_LOGPROBS)


class Take(NamedTuple):
    """Steps from now on take so long."""

    step_s: float


class Between(NamedTuple):
    """Asks for the steps that ran in this window."""

    begin: float
    end: float


def run_worker(pipe: Connection, token: str) -> None:
    """Tells its port, then answers `Take` and `Between`."""
    pace = Pace()
    steps: deque[StepTimes] = deque(maxlen=NUM_KEPT_STEPS)
    side = ModelSide(
        open_rendezvous=lambda world_size: open_rendezvous(world_size, HOST),
        join=join,
        load=partial(Sleeper, pace, steps),
        settle=freeze_heap,
    )
    server = serve(HOST, token, side)
    pipe.send(server.port)
    while (message := next_message(pipe)) is not None:
        match message:
            case Take():
                pace.step_s = message.step_s
                pipe.send(None)
            case Between():
                found = [
                    each
                    for each in list(steps)
                    if each.ended > message.begin and each.started < message.end
                ]
                pipe.send(found)
    # As the worker's own process: its threads may wait for a rank that is gone.
    threading.Thread(target=server.close, daemon=True).start()
    os._exit(0)
