"""What a model over several nodes does: its throughput, its steps, and a rank that is lost."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import grpc
import psutil

from benchmarks.overload.client import Target
from benchmarks.overload.server import served
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import bearer

PARTS = ("schedule", "encode", "wire", "forward", "sample", "publish", "total")
RANK_NAME = "lockstep:rank"
STREAM_S = 300.0
# Tokens that each stream has got when a rank is killed.
NUM_BEFORE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How a server is started, and where."""

    options: Sequence[str]
    variables: Mapping[str, str]
    prefix: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Streams that run at once, all of them as long."""

    num_streams: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one placement."""

    start_s: float  # until it serves
    tokens_per_s: float
    step_ms: Mapping[str, float]  # mean, by part
    recovery_s: float | None  # longest pause of a stream; None: no rank is on this machine
    num_differing: int  # streams with other tokens after the loss than without it


@dataclass(slots=True)
class _Stream:
    """What one got, and when."""

    token_ids: list[int]
    times: list[float]

    @property
    def longest_pause_s(self) -> float:
        return max(after - before for before, after in pairwise(self.times))


def measure(place: Place, load: Load) -> Measured:
    """Starts a server, and loses one of its ranks in the end. Raises RuntimeError: it failed."""
    others = set(_ranks())
    started = time.monotonic()
    with served(place.options, prefix=place.prefix, variables=place.variables) as (target, _):
        start_s = time.monotonic() - started
        with grpc.insecure_channel(target.grpc_address) as channel:
            client = _Client(target, channel)
            client.run(Load(num_streams=load.num_streams, num_tokens=NUM_BEFORE))  # warm
            before = client.step_seconds()
            begun = time.monotonic()
            undisturbed = client.run(load)
            seconds = time.monotonic() - begun
            after = client.step_seconds()
            ours = [each for each in _ranks() if each not in others]
            disturbed = client.run(load, on_begun=ours[-1].kill) if ours else []
    pauses = [each.longest_pause_s for each in disturbed]
    return Measured(
        start_s=start_s,
        tokens_per_s=load.num_streams * load.num_tokens / seconds,
        step_ms=_mean_ms(before, after),
        recovery_s=max(pauses, default=None),
        num_differing=sum(
            one.token_ids != other.token_ids
            for one, other in zip(undisturbed, disturbed, strict=False)
        ),
    )


class _Client:
    """Asks a server; the same streams each time."""

    def __init__(self, target: Target, channel: grpc.Channel) -> None:
        self._metadata = bearer(target.api_key)
        self._stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

    def run(self, load: Load, on_begun: Callable[[], None] | None = None) -> list[_Stream]:
        """All streams at once; `on_begun` is called when each has got some tokens."""
        begun = threading.Barrier(load.num_streams, on_begun)

        def stream(seed: int) -> _Stream:
            got = _Stream([], [])
            for message in self._generate(seed, load.num_tokens):
                if len(got.token_ids) < NUM_BEFORE <= len(got.token_ids) + len(message.token_ids):
                    begun.wait(STREAM_S)
                got.token_ids += message.token_ids
                got.times.append(time.monotonic())
            return got

        with ThreadPoolExecutor(load.num_streams) as pool:
            return list(pool.map(stream, range(load.num_streams)))

    def step_seconds(self) -> Mapping[str, tuple[float, int]]:
        """Of each part of all steps so far: seconds, and how many there were."""
        reply = self._stub.GetStats(inference_pb2.GetStatsRequest(), metadata=self._metadata)
        steps = reply.engines[0].stats.step_s
        return {
            name: (getattr(steps, name).sum, sum(getattr(steps, name).counts)) for name in PARTS
        }

    def _generate(self, seed: int, num_tokens: int) -> Iterator[inference_pb2.GenerateResponse]:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[2, *range(100 + seed, 132 + seed)]),
            sampling_params=common_pb2.SamplingParams(
                max_tokens=num_tokens, ignore_eos=True, temperature=1.0, seed=seed
            ),
        )
        call: Iterator[inference_pb2.GenerateResponse] = self._stub.Generate(
            request, metadata=self._metadata, timeout=STREAM_S
        )
        return call


def _ranks() -> list[psutil.Process]:
    """The processes on this machine that hold a rank, of whatever engine, the last rank last."""
    found = [
        process
        for process in psutil.process_iter(["name"])
        if process.info["name"].startswith(RANK_NAME)
    ]
    return sorted(found, key=lambda each: int(each.info["name"].removeprefix(RANK_NAME)))


def _mean_ms(
    before: Mapping[str, tuple[float, int]], after: Mapping[str, tuple[float, int]]
) -> Mapping[str, float]:
    """Of the steps between."""
    return {
        name: 1000 * (after[name][0] - before[name][0]) / (after[name][1] - before[name][1])
        for name in PARTS
    }
