"""Ranks of tiny models in this process, and an executor over them without a port."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from protos import worker_pb2
from runtime.executor.codec import decode_result, encode_masks, encode_sampler_inputs, encode_step
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks, no_masks
from tests.tiny_models import load_executor
from workers.batch import NO_MASKS, Batch
from workers.codec import decode_plan, limits_of
from workers.config import CacheLayout, WorkerConfig
from workers.model_executor import ModelExecutor
from workers.parallel import join, open_rendezvous
from workers.sampling_codec import decode_masks, encode_result
from workers.serial_thread import SerialThread

EPOCH = 1


@dataclass
class Rank:
    """One rank's model, and the thread that all of its calls come from."""

    thread: SerialThread
    executor: ModelExecutor


@contextmanager
def load_ranks(folder: Path, *, tp: int = 1) -> Iterator[list[Rank]]:
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
        )
        for rank in range(tp)
    ]
    groups = _on_all(threads, [lambda each=each: join(each, None) for each in configs])
    loads = [lambda each=each: load_executor(folder, each) for each in groups]
    executors = _on_all(threads, loads)
    try:
        yield [Rank(*pair) for pair in zip(threads, executors, strict=True)]
    finally:
        _on_all(threads, [each.close for each in groups])
        del store  # kept until here: the ranks met at it


def _on_all(threads: Sequence[SerialThread], tasks: Sequence[Callable]) -> list:
    """What each thread's task returns; they may wait for each other."""
    futures = [thread.submit(task) for thread, task in zip(threads, tasks, strict=True)]
    return [future.result() for future in futures]


class CodedExecutor:
    """Runs steps as GrpcExecutor and WorkerService do together, without a port."""

    def __init__(self, ranks: Sequence[Rank], layout: CacheLayout) -> None:
        self.plans: list[StepPlan] = []
        self.batch: Batch | None = None  # of the last step, on rank 0
        self._threads = [rank.thread for rank in ranks]
        self._executors = [rank.executor for rank in ranks]
        self._limits = limits_of(self._executors[0].spec, layout)
        self._on_all(lambda executor, _: executor.allocate_cache(layout))

    def execute(
        self, plan: StepPlan, make_masks: Callable[[], TokenMasks] = no_masks
    ) -> StepResult:
        self.plans.append(plan)
        message = encode_step(plan, epoch=EPOCH, return_input_hash=False)
        inputs = encode_sampler_inputs(plan.sampler_inputs)
        batches = [self._decode(message + inputs), *map(self._decode, [message] * self._num_others)]
        self.batch = batches[0]
        self._on_all(lambda executor, rank: executor.forward(batches[rank]))
        masks = NO_MASKS
        if plan.defer_sampling:
            sent = encode_masks(make_masks(), epoch=EPOCH, step_id=plan.step_id)
            sample = worker_pb2.StepRequest.FromString(sent).sample
            num_rows = len(plan.sample_index)
            masks = decode_masks("sample.masks", sample.masks, num_rows, self._limits.vocab_size)
        sampled, *others = self._on_all(lambda executor, _: executor.sample(masks))
        assert others == [None] * self._num_others
        result = encode_result(self.batch, *sampled)
        reply = worker_pb2.StepReply(step_id=plan.step_id, result=result)
        return decode_result(worker_pb2.StepReply.FromString(reply.SerializeToString()))

    def close(self) -> None:
        pass

    @property
    def _num_others(self) -> int:
        return len(self._executors) - 1

    def _decode(self, message: bytes) -> Batch:
        request = worker_pb2.StepRequest.FromString(message)
        return decode_plan(request.plan, self._limits, request.sampler_inputs)

    def _on_all(self, task: Callable[[ModelExecutor, int], object]) -> list:
        tasks = [
            lambda executor=executor, rank=rank: task(executor, rank)
            for rank, executor in enumerate(self._executors)
        ]
        return _on_all(self._threads, tasks)
