"""Builders and fakes for the road between driver and ranks."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np

from protos import worker_pb2, worker_pb2_grpc
from protos.auth import bearer
from runtime.scheduling.step_plan import BlockTables, SamplingColumns, StepPlan
from workers.batch import Batch
from workers.codec import StepLimits
from workers.config import CacheLayout, LayerCacheSpec, ModelSpec, WorkerConfig
from workers.model_side import ModelSide, Progress
from workers.server import WorkerServer, serve

TOKEN = "the-right-token"
EPOCH = 3
TIMEOUT_S = 20.0

LIMITS = StepLimits(vocab_size=4096, max_model_len=128, num_blocks=32, block_size=16, windows=(0,))


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
            seed=np.array([2**64 - 1, 7], np.uint64),
            min_length=ints(0, 46),
        ),
        block_copies=np.zeros((0, 2), np.int32),
    )
    return replace(plan, **changes)


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
    on_step: Callable[[], None] = lambda: None
    gate: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)
    threads: set[int] = field(default_factory=set)
    batches: list[Batch] = field(default_factory=list)
    timings: FakeTimings = field(default_factory=FakeTimings)

    def __post_init__(self) -> None:
        self.gate.set()

    def side(self) -> ModelSide:
        return ModelSide(open_rendezvous=self.open_rendezvous, join=self.join, load=self.load)

    def open_rendezvous(self, world_size: int) -> tuple[Any, int]:
        self.threads.add(threading.get_ident())
        return object(), 1234

    def join(self, config: WorkerConfig, store: Any) -> "FakeModel":
        self.threads.add(threading.get_ident())
        return self

    def load(self, config: WorkerConfig, parallel: Any, on_progress: Progress) -> "FakeModel":
        self.threads.add(threading.get_ident())
        self.on_load()
        for loaded in range(0, 1001, 100):
            on_progress(loaded, 1000)
        return self

    def allocate_cache(self, layout: CacheLayout) -> int:
        self.threads.add(threading.get_ident())
        self.on_allocate()
        return layout.num_blocks * 100

    def execute_model(self, batch: Batch) -> dict[int, int]:
        self.threads.add(threading.get_ident())
        self.batches.append(batch)
        self.started.set()
        self.gate.wait(TIMEOUT_S)
        self.on_step()
        rows = batch.sample_index.tolist()
        sequences = batch.sample_sequence.tolist()
        return {
            batch.sequence_ids[sequence]: int(batch.input_ids[row]) + 1
            for row, sequence in zip(rows, sequences, strict=True)
        }

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
        return self.stub.AllocateCache(request, timeout=TIMEOUT_S, metadata=self.metadata)

    def execute(self, *requests: worker_pb2.StepRequest) -> list[worker_pb2.StepReply]:
        call = self.stub.Execute(iter(requests), timeout=TIMEOUT_S, metadata=self.metadata)
        return list(call)

    def shutdown(self) -> worker_pb2.ShutdownReply:
        request = worker_pb2.ShutdownRequest(epoch=EPOCH)
        return self.stub.Shutdown(request, timeout=TIMEOUT_S, metadata=self.metadata)


@contextmanager
def running_worker(model: FakeModel) -> Iterator[tuple[Client, WorkerServer]]:
    """A worker that serves in this process, and a client with its token."""
    server = serve("127.0.0.1", TOKEN, model.side())
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
