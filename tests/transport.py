"""Builders and fakes for the road between driver and ranks."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import torch

from protos import worker_pb2, worker_pb2_grpc
from protos.auth import bearer
from runtime.scheduling.sampler_inputs import no_inputs
from runtime.scheduling.step_plan import BlockTables, SamplingColumns, StepPlan
from workers.batch import NO_MASKS, Batch, LateInputs, TokenMasks
from workers.codec import StepLimits
from workers.config import CacheLayout, LayerCacheSpec, ModelSpec, WorkerConfig
from workers.model_side import ModelSide, Progress
from workers.sampling.logprobs import Logprobs
from workers.sampling.sampler import Sampled, Samples
from workers.server import WorkerServer, serve

TOKEN = "the-right-token"
EPOCH = 3
TIMEOUT_S = 20.0

LIMITS = StepLimits(
    vocab_size=4096, max_model_len=128, num_blocks=32, block_size=16, windows=(0,), chunks=(0,)
)


def ints(*values: int) -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.array(values, np.int32)


def example_plan(step_id: int = 1, **changes: Any) -> StepPlan:
    """The example of ARCHITECTURE: a new request in block 7, and one that feeds its 43rd token."""
    plan = StepPlan(
        step_id=step_id,
        input_ids=ints(101, 872, 2304, 1198, 345),
        positions=ints(0, 1, 2, 3, 42),
        sequence_ids=np.array([2**64 - 1, 12], np.uint64),
        seq_lens=ints(0, 42),
        query_lens=ints(4, 1),
        block_tables=(
            BlockTables(
                num_blocks=ints(1, 3), first_blocks=ints(0, 0), block_ids=ints(7, 12, 23, 5)
            ),
        ),
        sample_index=ints(3, 4),
        sample_sequence=ints(0, 1),
        sampling=SamplingColumns(
            temperature=np.array([0, 0.5], np.float32),
            top_k=ints(0, 40),
            top_p=np.array([1, 0.9], np.float32),
            min_p=np.array([0, 0.25], np.float32),
            seed=np.array([2**64 - 1, 7], np.uint64),
            min_length=ints(0, 46),
            presence_penalty=np.array([0, 0.5], np.float32),
            frequency_penalty=np.array([0, -0.5], np.float32),
            repetition_penalty=np.array([1, 1.25], np.float32),
            num_logprobs=ints(-1, 3),
        ),
        sampler_inputs=no_inputs(),
        defer_sampling=False,
        score_index=ints(),
        score_token_ids=ints(),
        score_num_tops=ints(),
        block_copies=np.zeros((0, 2), np.int32),
    )
    return replace(plan, **changes)


def make_logprobs(
    *entries: tuple[int, float, Sequence[int], Sequence[float]],
) -> Logprobs:
    """Each entry with its row, the token's logprob, and the best tokens with theirs."""
    width = max((len(ids) for _, _, ids, _ in entries), default=0)
    never = float("-inf")
    return Logprobs(
        rows=torch.tensor([row for row, *_ in entries], dtype=torch.int64),
        logprobs=torch.tensor([own for _, own, *_ in entries], dtype=torch.float32),
        num_tops=torch.tensor([len(ids) for _, _, ids, _ in entries], dtype=torch.int64),
        top_token_ids=torch.tensor(
            [[*ids, *[0] * width][:width] for _, _, ids, _ in entries], dtype=torch.int64
        ).reshape(len(entries), width),
        top_logprobs=torch.tensor(
            [[*values, *[never] * width][:width] for *_, values in entries], dtype=torch.float32
        ).reshape(len(entries), width),
    )


def make_samples(
    token_ids: "Sequence[int] | torch.Tensor",
    *,
    faults: Sequence[int] = (),
    logprobs: Logprobs | None = None,
) -> Samples:
    count = len(token_ids)
    return Samples(
        token_ids=torch.as_tensor(token_ids, dtype=torch.int64),
        faults=torch.tensor(faults or [0] * count, dtype=torch.uint8),
        logprobs=logprobs or make_logprobs(),
    )


def result_of(token_ids: Mapping[int, int]) -> worker_pb2.StepResult:
    """What rank 0 sends for these tokens by sequence id."""
    return worker_pb2.StepResult(
        sequence_ids=np.array(list(token_ids), np.uint64).tobytes(),
        num_tokens=np.ones(len(token_ids), np.int32).tobytes(),
        token_ids=np.array(list(token_ids.values()), np.int32).tobytes(),
    )


def model_spec(**changes: Any) -> ModelSpec:
    layer = LayerCacheSpec(window=0, num_kv_heads=2, k_dim=8, v_dim=8, element_bytes=4)
    spec = ModelSpec(
        architecture="FakeForCausalLM",
        vocab_size=4096,
        max_model_len=128,
        eos_token_ids=(2,),
        layers=(layer, layer),
        available_memory_bytes=1 << 30,
        block_size_multiple=1,
        parameter_bytes=1000,
        attention="reference",
    )
    return replace(spec, **changes)


@dataclass
class FakeTimings:
    forward_us: int = 11
    sample_us: int = 5


@dataclass
class FakeModel:
    """A model side whose next token is the last one plus 1.

    A step waits for `gate`. The hooks may raise. `threads` are those that it was called on.
    """

    spec: ModelSpec = field(default_factory=model_spec)
    on_load: Callable[[], None] = lambda: None
    on_allocate: Callable[[], None] = lambda: None
    on_settle: Callable[[], None] = lambda: None
    on_step: Callable[[], None] = lambda: None
    gate: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)
    threads: set[int] = field(default_factory=set)
    batches: list[Batch] = field(default_factory=list)
    masks: list[TokenMasks] = field(default_factory=list)
    rank: int = 0
    num_graphs: int = 0  # to capture
    timings: FakeTimings = field(default_factory=FakeTimings)

    def __post_init__(self) -> None:
        self.gate.set()

    def side(self) -> ModelSide:
        return ModelSide(
            open_rendezvous=self.open_rendezvous,
            join=self.join,
            load=self.load,
            settle=self.on_settle,
        )

    def open_rendezvous(self, world_size: int) -> tuple[Any, int]:
        self.threads.add(threading.get_ident())
        return object(), 1234

    def join(self, config: WorkerConfig, store: Any) -> "FakeModel":
        self.threads.add(threading.get_ident())
        self.rank = config.rank
        return self

    def load(self, config: WorkerConfig, parallel: Any, on_progress: Progress) -> "FakeModel":
        self.threads.add(threading.get_ident())
        self.on_load()
        for loaded in range(0, 1001, 100):
            on_progress(loaded, 1000)
        return self

    def allocate_cache(self, layout: CacheLayout, on_progress: Progress) -> int:
        self.threads.add(threading.get_ident())
        self.on_allocate()
        for captured in range(1, self.num_graphs + 1):
            on_progress(captured, self.num_graphs)
        return layout.num_blocks * 100

    def forward(self, batch: Batch) -> torch.Tensor:
        self.threads.add(threading.get_ident())
        self.batches.append(batch)
        self.started.set()
        self.gate.wait(TIMEOUT_S)
        self.on_step()
        return batch.input_ids

    def sample(self, late: LateInputs | None = None) -> Sampled | None:
        self.threads.add(threading.get_ident())
        self.masks.append(NO_MASKS if late is None else late.masks)
        if self.rank != 0:
            return None
        batch = self.batches[-1]
        samples = make_samples(batch.input_ids[batch.sample_index.long()] + 1)
        return lambda: (samples, make_logprobs())

    def close(self) -> None:
        self.threads.add(threading.get_ident())


class Client:
    """Calls a worker as the driver does, or as a stranger with another token."""

    def __init__(self, channel: grpc.Channel, token: str | None = TOKEN) -> None:
        self.channel = channel
        self.stub = worker_pb2_grpc.WorkerStub(channel)
        self.metadata = bearer(token) if token is not None else ()

    def open_rendezvous(self, world_size: int = 2) -> worker_pb2.OpenRendezvousReply:
        request = worker_pb2.OpenRendezvousRequest(epoch=EPOCH, world_size=world_size)
        return self.stub.OpenRendezvous(request, timeout=TIMEOUT_S, metadata=self.metadata)

    def initialize(self, **changes: Any) -> list[worker_pb2.InitializeReply]:
        fields = {"epoch": EPOCH, "rank": 0, "tp_size": 1, "model_path": "m", **changes}
        request = worker_pb2.InitializeRequest(**fields)
        return list(self.stub.Initialize(request, timeout=TIMEOUT_S, metadata=self.metadata))

    def allocate_cache(self, **changes: Any) -> worker_pb2.AllocateCacheReply:
        groups = [worker_pb2.CacheGroup(layers=[0, 1])]
        fields = {"epoch": EPOCH, "block_size": 16, "num_blocks": 32, "groups": groups, **changes}
        request = worker_pb2.AllocateCacheRequest(**fields)
        *progress, last = self.stub.AllocateCache(
            request, timeout=TIMEOUT_S, metadata=self.metadata
        )
        self.captures = [(each.progress.captured, each.progress.total) for each in progress]
        assert last.HasField("cache_bytes")
        return last

    def execute(self, *requests: worker_pb2.StepRequest) -> list[worker_pb2.StepReply]:
        call = self.stub.Execute(iter(requests), timeout=TIMEOUT_S, metadata=self.metadata)
        return list(call)

    def shutdown(self) -> worker_pb2.ShutdownReply:
        request = worker_pb2.ShutdownRequest(epoch=EPOCH)
        return self.stub.Shutdown(request, timeout=TIMEOUT_S, metadata=self.metadata)


@contextmanager
def running_worker(
    model: FakeModel, *, on_expired: Callable[[], None] = lambda: None, **options: Any
) -> Iterator[tuple[Client, WorkerServer]]:
    """A worker that serves in this process, which no lease ends, and a client with its token."""
    server = serve("127.0.0.1", TOKEN, model.side(), on_expired=on_expired, **options)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Client(channel), server
    finally:
        model.gate.set()
        server.close()


@contextmanager
def ready_worker(model: FakeModel, rank: int = 0, tp_size: int = 1) -> Iterator[Client]:
    """A worker that steps can be sent to."""
    with running_worker(model) as (client, _):
        client.initialize(rank=rank, tp_size=tp_size)
        client.allocate_cache()
        yield client
