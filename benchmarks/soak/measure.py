"""Runs a server under mixed traffic, with idle gaps in which nothing may be left."""

import asyncio
import tempfile
import time
from pathlib import Path
from random import Random

import grpc
import psutil

from benchmarks.overload.client import Target
from benchmarks.overload.measure import wait_idle
from benchmarks.overload.server import Family, driver_and_frontends, served
from benchmarks.soak.client import connected
from benchmarks.soak.finding import Finding
from benchmarks.soak.traffic import Traffic
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import bearer

ROUND_S = 20.0
LOOK_S = 1.0
# Small enough that sequences take each other's blocks all the time.
KV_BYTES = 448 << 10
OPTIONS = (
    "--launcher=local",
    "--threads-per-rank=1",
    "--frontends=2",
    f"--kv-memory={KV_BYTES}",
    "--max-num-batched-tokens=96",
    "--max-num-seqs=32",
    "--max-num-scored-tokens=32",
    "--policy=priority",
    "--priority-ageing-s=3",
    "--check-ranks",
    "--check-deltas",
)


def server_options(folder: Path, *, tp: int, depth: int) -> tuple[str, ...]:
    return (f"--model={folder}", f"--tp={tp}", f"--pipeline-depth={depth}", *OPTIONS)


def measure(*, seconds: float, tp: int, depth: int, seed: int = 0) -> Finding:
    """Raises RuntimeError: the server ended, or ended with an error."""
    from benchmarks.soak.model import save_model

    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as folder:
        save_model(Path(folder))
        with served(server_options(Path(folder), tp=tp, depth=depth)) as (target, pid):
            try:
                return asyncio.run(_soak(target, pid, seconds, Random(seed)))
            except* psutil.NoSuchProcess:
                raise RuntimeError("a process of the server ended; its log says why") from None


async def _soak(target: Target, pid: int, seconds: float, draw: Random) -> Finding:
    family = Family(driver_and_frontends(pid) | _ranks(pid))
    leaks: list[str] = []
    num_gaps = 0
    end_s = time.monotonic() + seconds
    async with connected(target) as client, asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(_look(family))
        traffic = Traffic(client, draw)
        while (left_s := end_s - time.monotonic()) > 0:
            await traffic.run(min(ROUND_S, left_s))
            idle_s, state = await asyncio.to_thread(wait_idle, target)
            num_gaps += 1
            if idle_s is None:
                leaks.append(f"gap {num_gaps}: {state}")
        looking.cancel()
    return Finding(
        seconds=seconds,
        log=traffic.log,
        num_gaps=num_gaps,
        leaks=leaks,
        megabytes=family.megabytes,
        stats=await asyncio.to_thread(_stats_of, target),
    )


async def _look(family: Family) -> None:
    """Raises psutil.NoSuchProcess: one of them has ended."""
    while True:
        family.look()
        await asyncio.sleep(LOOK_S)


def _ranks(pid: int) -> dict[str, psutil.Process]:
    """Worker processes, in the order of their start, which is that of ranks."""
    workers = [
        each for each in psutil.Process(pid).children() if "workers.server" in each.cmdline()
    ]
    return {f"rank {rank}": each for rank, each in enumerate(sorted(workers, key=_start))}


def _start(process: psutil.Process) -> tuple[float, int]:
    return process.create_time(), process.pid


def _stats_of(target: Target) -> common_pb2.EngineStats:
    with grpc.insecure_channel(target.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        response = stub.GetStats(inference_pb2.GetStatsRequest(), metadata=bearer(target.api_key))
    stats: common_pb2.EngineStats = response.engines[0].stats
    return stats
