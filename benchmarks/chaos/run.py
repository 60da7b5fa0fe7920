"""One run: what is expected, then fault after fault under load, then a look at what is left."""

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import grpc

from benchmarks.chaos.asks import draw_asks
from benchmarks.chaos.faults import Kind, plan_faults
from benchmarks.chaos.findings import Finding, Result
from benchmarks.chaos.load import Load
from benchmarks.chaos.model import write_model
from benchmarks.chaos.observer import Observer
from benchmarks.chaos.places import place
from benchmarks.chaos.server import Server, served
from benchmarks.overload.client import Target
from benchmarks.overload.measure import wait_idle
from protos import inference_pb2, inference_pb2_grpc
from protos.auth import bearer
from workers.faults import FOLDER_VARIABLE

LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is to be run."""

    launcher: str
    num_nodes: int = 1
    num_faults: int
    kinds: Sequence[Kind]
    seed: int
    minutes: float = 0.0  # over which faults are spread; 0: each soon after the last
    num_asks: int = 56


def run(case: Case, *, log: TextIO, on_finding: Callable[[Finding], None]) -> Result:
    """The server's log goes to `log`.

    Raises ConfigError: there can't be two nodes here. Raises RuntimeError: the server ended, or
    never recovered. Raises LostError: a request failed before any fault.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as folder:
        model, faults = Path(folder, "model"), Path(folder, "faults")
        write_model(model)
        faults.mkdir(mode=0o700)
        variables = {FOLDER_VARIABLE: str(faults)}
        with place(case.launcher, case.num_nodes) as where:
            with served(model, where, log=log, variables=variables) as (server, leftovers):
                result = asyncio.run(_run(case, server, faults, on_finding))
                result.idle_s, result.state = wait_idle(server.target)
                result.num_preemptions = _num_preemptions(server.target)
            result.leftovers = leftovers
        return result


async def _run(
    case: Case, server: Server, folder: Path, on_finding: Callable[[Finding], None]
) -> Result:
    result, load = Result(), Load(server.target)
    asks = draw_asks(case.num_asks)
    expected = await load.answers(asks)
    # Once more: what differs now differs without a fault.
    async with load.running(expected) as result.undisturbed:
        while result.undisturbed.num_requests < len(asks):
            await asyncio.sleep(LOOK_S)
    began = time.time()
    observer = Observer(server, load, folder, began=began)
    async with load.running(expected) as result.disturbed:
        plans = itertools.islice(plan_faults(case.kinds, case.seed), case.num_faults)
        for number, plan in enumerate(plans):
            earliest = began + 60 * case.minutes * number / case.num_faults
            await asyncio.sleep(max(0.0, earliest - time.time()) + plan.pause_s)
            finding = await observer.befall(number + 1, plan)
            result.findings.append(finding)
            on_finding(finding)
    result.seconds = time.time() - began
    return result


def _num_preemptions(target: Target) -> int:
    with grpc.insecure_channel(target.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        response = stub.GetStats(inference_pb2.GetStatsRequest(), metadata=bearer(target.api_key))
        return sum(each.stats.num_preemptions for each in response.engines)
