"""Ranks of tiny models in this process, and an executor over them without a port."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protos import worker_pb2
from runtime.executor.codec import (
    decode_result,
    encode_delta,
    encode_sample,
    encode_sampler_inputs,
    encode_step,
)
from runtime.scheduling.sampler_inputs import SamplerInputs
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks
from tests.tiny_models import load_executor
from workers.batch import Batch, LateInputs
from workers.codec import decode_plan, input_hash, limits_of
from workers.config import CacheLayout, WorkerConfig
from workers.delta_codec import DeltaDecoder
from workers.model_executor import ModelExecutor
from workers.parallel import join, open_rendezvous
from workers.sampling_codec import decode_inputs, decode_masks, encode_result
from workers.serial_thread import SerialThread

EPOCH = 1
USES_DELTAS = os.environ.get("LOCKSTEP_TEST_DELTAS") != "0"


@dataclass
class Rank:
    """One rank's model, and the thread that all of its calls come from."""

    thread: SerialThread
    executor: ModelExecutor


@contextmanager
def load_ranks(
    folder: Path, *, tp: int = 1, deterministic: bool = False, **changes: Any
) -> Iterator[list[Rank]]:
    """The ranks of one model, joined over gloo where there are several."""
    threads = [SerialThread(f"rank-{rank}") for rank in range(tp)]
    store, port = open_rendezvous(tp, "127.0.0.1") if tp > 1 else (None, 0)
    configs = [
        WorkerConfig(
            model_path=str(folder),
            rank=rank,
            tp_size=tp,
            rendezvous_host="127.0.0.1",
            rendezvous_port=port,
            deterministic=deterministic,
        )
        for rank in range(tp)
    ]
    groups = _on_all(threads, [lambda each=each: join(each, None) for each in configs])
    loads = [
        lambda each=each: load_executor(folder, each, deterministic=deterministic, **changes)
        for each in groups
    ]
    executors = _on_all(threads, loads)
    try:
        yield [Rank(*pair) for pair in zip(threads, executors, strict=True)]
    finally:
        _on_all(threads, [each.close for each in groups])
        del store  # kept until here: the ranks met at it


class JoinedRanks:
    """All ranks as one executor, for batches without a codec."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.spec = ranks[0].executor.spec
        self._ranks = ranks

    def allocate_cache(self, layout: CacheLayout) -> None:
        self._on_all(lambda executor: executor.allocate_cache(layout))

    def compute_logits(self, batch: Batch) -> torch.Tensor:
        return self._on_all(lambda executor: executor.compute_logits(batch))[0]

    def _on_all(self, task: Callable[[ModelExecutor], object]) -> list:
        tasks = [lambda each=each: task(each.executor) for each in self._ranks]
        return _on_all([each.thread for each in self._ranks], tasks)


def _on_all(threads: Sequence[SerialThread], tasks: Sequence[Callable]) -> list:
    """What each thread's task returns; they may wait for each other."""
    futures = [thread.submit(task) for thread, task in zip(threads, tasks, strict=True)]
    return [future.result() for future in futures]


class CodedExecutor:
    """Runs steps as GrpcExecutor and WorkerService do together, without a port.

    As deltas, unless LOCKSTEP_TEST_DELTAS is 0.
    """

    def __init__(self, ranks: Sequence[Rank], layout: CacheLayout) -> None:
        self.plans: list[StepPlan] = []
        self.batch: Batch | None = None  # of the last step, on rank 0
        self._steps: deque[tuple[StepPlan, list[Batch]]] = deque()
        self._late: dict[int, LateInputs] = {}  # by step
        self._shared: dict[int, int] = {}  # samples of each step
        self._decoders = [DeltaDecoder() for _ in ranks]
        self._threads = [rank.thread for rank in ranks]
        self._executors = [rank.executor for rank in ranks]
        self._limits = limits_of(self._executors[0].spec, layout)
        self._on_all(lambda executor, _: executor.allocate_cache(layout))

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        encode = encode_delta if USES_DELTAS else encode_step
        message = encode(plan, epoch=EPOCH, return_input_hash=False, share_samples=True)
        inputs = encode_sampler_inputs(plan.sampler_inputs)
        batches = [
            self._decode(decoder, message if rank else message + inputs)
            for rank, decoder in enumerate(self._decoders)
        ]
        self._shared[plan.step_id] = len(plan.sample_index)
        self._steps.append((plan, batches))

    def sample(self, step_id: int, inputs: SamplerInputs, masks: TokenMasks) -> None:
        sent = worker_pb2.StepRequest.FromString(
            encode_sample(inputs, masks, epoch=EPOCH, step_id=step_id)
        )
        num_rows, vocab_size = self._shared[step_id], self._limits.vocab_size
        self._late[step_id] = LateInputs(
            inputs=decode_inputs(sent.sample.sampler_inputs, num_rows, vocab_size),
            masks=decode_masks("sample.masks", sent.sample.masks, num_rows, vocab_size),
        )

    def result(self) -> StepResult:
        """Runs the oldest step."""
        plan, batches = self._steps.popleft()
        self.batch = batches[0]
        fed = self._on_all(lambda executor, rank: executor.forward(batches[rank]))
        hashes = {input_hash(*pair) for pair in zip(batches, fed, strict=True)}
        assert len(hashes) == 1, f"the ranks disagree in step {plan.step_id}"
        late = self._late.pop(plan.step_id) if plan.defer_sampling else None
        sampled, *others = self._on_all(
            lambda executor, rank: executor.sample(None if rank else late)
        )
        assert others == [None] * self._num_others
        result = encode_result(self.batch, *sampled())
        reply = worker_pb2.StepReply(step_id=plan.step_id, result=result)
        return decode_result(worker_pb2.StepReply.FromString(reply.SerializeToString()))

    def close(self) -> None:
        pass

    @property
    def _num_others(self) -> int:
        return len(self._executors) - 1

    def _decode(self, decoder: DeltaDecoder, message: bytes) -> Batch:
        request = worker_pb2.StepRequest.FromString(message)
        decode = decoder.decode if USES_DELTAS else decode_plan
        return decode(request, self._limits, self._shared)

    def _on_all(self, task: Callable[[ModelExecutor, int], object]) -> list:
        tasks = [
            lambda executor=executor, rank=rank: task(executor, rank)
            for rank, executor in enumerate(self._executors)
        ]
        return _on_all(self._threads, tasks)
