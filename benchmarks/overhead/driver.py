"""The driver's process: the real engine, its port, and its stream to each rank."""

import secrets
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from time import monotonic, perf_counter
from typing import Any, NamedTuple

import grpc

from benchmarks.overhead.cases import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_ROWS,
    STEP_TOKENS,
    VOCAB_SIZE,
    Deployment,
)
from benchmarks.overhead.child import TIMEOUT_S, next_message
from runtime.cluster.base import OnDeath, WorkerAddress
from runtime.cluster.group import WorkerGroup
from runtime.cluster.worker_client import WorkerClient
from runtime.collector import Sweep, calm_collector
from runtime.config import EngineConfig
from runtime.driver import make_scheduler, plan_cache
from runtime.engine import Engine
from runtime.engine_service import EngineServer
from runtime.executor.deadlines import StepDeadlines
from runtime.executor.grpc_executor import GrpcExecutor
from runtime.request import EngineStats, ModelInfo
from runtime.structured import NoCompiler

HOST = "127.0.0.1"
EPOCH = 1
# All rows for 10,000 steps, of one layer with a byte for K and one for V.
KV_BYTES = MAX_ROWS * 10_000 * 2


class GivenWorkers:
    """Workers that somebody else starts and ends."""

    ends_workers = False

    def __init__(self, ports: list[int]) -> None:
        self.addresses = [
            WorkerAddress(rank=rank, node="local", host=HOST, port=port)
            for rank, port in enumerate(ports)
        ]

    def launch(self, count: int) -> list[WorkerAddress]:
        return self.addresses

    def watch(self, on_death: OnDeath) -> None:
        """Their ends are seen by who started them."""

    def close(self, *, at_once: bool = False) -> None:
        """They are somebody else's."""


class CountingChannel:
    """A channel that keeps the sizes of what the executor's stream sends over it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._sizes: list[int] = []
        self._channel = channel

    def stream_stream(self, method: str, **options: Any) -> Callable[..., Any]:
        execute = self._channel.stream_stream(method, **options)

        def call(requests: Iterator[bytes], **options: Any) -> Any:
            return execute(self._counted(requests), **options)

        return call

    def _counted(self, requests: Iterable[bytes]) -> Iterator[bytes]:
        for request in requests:
            self._sizes.append(len(request))
            yield request

    def take_sizes(self) -> list[int]:
        """Of the messages since they were taken last."""
        sizes, self._sizes = self._sizes, []
        return sizes


class Look(NamedTuple):
    """What the engine has done so far."""

    at: float  # seconds of `perf_counter`
    stats: EngineStats
    sent_bytes: list[int]  # of each step message to rank 0 since the last look


class Address(NamedTuple):
    """Where frontends reach the engine."""

    port: int
    token: str


def run_driver(
    pipe: Connection, ports: list[int], token: str, model_path: str, on: Deployment
) -> None:
    """Tells the engine's address; then answers each message with a `Look`."""
    config = EngineConfig(
        model="sleeper",
        launcher="local",
        tp=on.tp,
        pipeline_depth=on.depth,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_partial_prefills=MAX_ROWS,
        kv_memory=KV_BYTES,
        step_timeout_s=TIMEOUT_S,
    )
    workers = GivenWorkers(ports)
    clients = [WorkerClient(each, token=token, epoch=EPOCH) for each in workers.addresses]
    with WorkerGroup(config, workers, clients, token=token, epoch=EPOCH) as group:
        group.load(model_path, monotonic() + TIMEOUT_S, lambda loaded, total: None)
        layout = plan_cache(config, group.spec)
        group.allocate_cache(layout)
        model = ModelInfo(
            name=config.model,
            path=model_path,
            architecture=group.spec.architecture,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=group.spec.eos_token_ids,
            tp_size=on.tp,
        )
        channels = [CountingChannel(client.channel) for client in clients]
        executor = GrpcExecutor(
            channels,
            token=token,
            epoch=EPOCH,
            deadlines=StepDeadlines(config.step_timeout_s),
            check_ranks=False,
            share_samples=on.depth > 1,
            on_broken=lambda rank, cause: None,
        )
        engine = Engine(
            model=model,
            scheduler=make_scheduler(config, layout, model),
            executor=executor,
            compiler=NoCompiler("the model computes nothing"),
            depth=on.depth,
            on_wait=Sweep(),
        )
        server = EngineServer(engine, secrets.token_urlsafe())
        engine.start()
        server.start()
        calm_collector()
        pipe.send(Address(server.port, server.token))
        while next_message(pipe) is not None:
            pipe.send(Look(perf_counter(), engine.stats(), channels[0].take_sizes()))
        engine.stop()
        server.stop(grace_s=1.0)
