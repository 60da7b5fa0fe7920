"""Finds what a server can do, asks for far more, and looks at it afterwards."""

import asyncio
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc
import grpc.aio

from benchmarks.overload.client import Outcome, Target, connected
from benchmarks.overload.load import ClosedLoop, OpenLoop, run_load
from benchmarks.overload.server import Family, driver_and_frontends, served
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import bearer

# What runs and what waits is bounded, so that who is let in needn't wait long.
NUM_RUNNING = 8
NUM_QUEUED = 8
QUEUE_TIMEOUT_S = 10.0
OPERATOR_OPTIONS = (
    "--model=demo",
    "--launcher=local",
    # One core for the model; frontends, driver and load share what is left.
    "--threads-per-rank=1",
    "--frontends=2",
    f"--max-num-seqs={NUM_RUNNING}",
    f"--max-queued-requests={NUM_QUEUED}",
    f"--queue-timeout-s={QUEUE_TIMEOUT_S:g}",
    "--max-requests=256",
)
WARM_UP_S = 3.0
# After the load, everything is to be idle within so long.
IDLE_S = 5.0
IDLE_LOOK_S = 0.05
# Numbers of requests, by which none is asked twice.
CLOSED_NUMBER, OPEN_NUMBER, LAST_NUMBER = 1_000_000, 2_000_000, 3_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one run showed."""

    capacity: float  # requests per second
    offered: float
    at_capacity: Sequence[Outcome]
    overloaded: Sequence[Outcome]
    memory: Family
    idle_s: float | None  # from the end of the load until nothing was left; None: it wasn't so
    state: "State"  # after that
    last: Outcome  # one request at the end


class State(NamedTuple):
    """What a server holds of requests."""

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_open_requests: float  # in the frontends

    @property
    def is_idle(self) -> bool:
        return not any(self)


def measure(*, factor: float, seconds: float, capacity_s: float) -> Finding:
    """Offers `factor` times what the server does in `capacity_s` of as many as it lets in."""
    with served(OPERATOR_OPTIONS) as (target, pid):
        num_clients = NUM_RUNNING + NUM_QUEUED
        run_load(target, ClosedLoop(num_clients=num_clients, seconds=WARM_UP_S))
        load = ClosedLoop(num_clients=num_clients, seconds=capacity_s, first_number=CLOSED_NUMBER)
        at_capacity = run_load(target, load)
        # By Little's law: what is under way is what comes, for as long as it takes.
        total_s = [each.total_s for each in at_capacity if each.end == "answered"]
        capacity = num_clients * len(total_s) / sum(total_s)
        family = Family(driver_and_frontends(pid))
        family.look()
        overload = OpenLoop(per_second=factor * capacity, seconds=seconds, first_number=OPEN_NUMBER)
        overloaded = run_load(target, overload, family.look)
        idle_s, state = wait_idle(target)
        return Finding(
            capacity=capacity,
            offered=overload.per_second,
            at_capacity=at_capacity,
            overloaded=overloaded,
            memory=family,
            idle_s=idle_s,
            state=state,
            last=asyncio.run(ask_once(target)),
        )


async def ask_once(target: Target) -> Outcome:
    async with connected(target) as client:
        return await client.ask(LAST_NUMBER)


def wait_idle(target: Target) -> tuple[float | None, State]:
    """Until the server holds nothing of any request."""
    started_s = time.monotonic()
    with grpc.insecure_channel(target.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        while True:
            state = look_at(target, stub)
            passed_s = time.monotonic() - started_s
            if state.is_idle:
                return passed_s, state
            if passed_s > IDLE_S:
                return None, state
            time.sleep(IDLE_LOOK_S)


def look_at(target: Target, stub: inference_pb2_grpc.InferenceStub) -> State:
    response = stub.GetStats(inference_pb2.GetStatsRequest(), metadata=bearer(target.api_key))
    stats: list[common_pb2.EngineStats] = [each.stats for each in response.engines]
    scrape = urllib.request.Request(
        f"http://{target.http_address}/metrics",
        headers={"Authorization": f"Bearer {target.api_key}"},
    )
    with urllib.request.urlopen(scrape, timeout=IDLE_S) as answer:
        lines = answer.read().decode().splitlines()
    return State(
        num_running=sum(each.num_running for each in stats),
        num_waiting=sum(each.num_waiting for each in stats),
        num_used_blocks=sum(each.num_blocks - each.num_free_blocks for each in stats),
        num_open_requests=sum(
            float(line.split()[-1]) for line in lines if line.startswith("lockstep_open_requests{")
        ),
    )
