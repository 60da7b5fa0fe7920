"""How far the cost model is from a run on this machine.

The embedded model is served on the CPU by the real engine, with its real worker. The cost model
gets this CPU's bandwidth and FLOP/s from a short benchmark of linear layers of the model's own
shapes. What those don't explain, such as the loop over sequences in its attention and the norms of
every token, goes into the three overheads, fitted to three measured points: decode steps of 1 and
of 8 sequences, and one prompt. The model is then compared on workloads that had no part in the fit.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from benchmarks.simulate.cost import CostConstants, CostModel
from benchmarks.simulate.deployment import Deployment
from benchmarks.simulate.hardware import Device
from benchmarks.simulate.model_shape import ModelShape, read_model_config
from benchmarks.simulate.prompts import Prompts
from benchmarks.simulate.replicas import Replicas
from benchmarks.simulate.request_log import RequestLog
from benchmarks.simulate.summary import percentiles_ms
from benchmarks.simulate.workload import SimulatedRequest, Workload
from runtime.config import EngineConfig
from runtime.driver import running_engine
from runtime.engine import Engine
from runtime.live_requests import Outputs

# One thread: of two, each would wait for the other at every operation while anything else runs.
NUM_THREADS = 1
CONFIG = EngineConfig(
    model="demo",
    launcher="local",
    threads_per_rank=NUM_THREADS,
    kv_memory=256 << 20,
    max_model_len=1024,
)
CALIBRATION_ROWS = (1, 8)
CALIBRATION_PROMPT = 64
CALIBRATION_OUTPUT = 32
CALIBRATION_CHUNK = 256  # tokens of the prompt whose first token is timed
GEMM_ROWS = 256
DEVICE_REPEATS = 30
PROMPT_REPEATS = 7
# Efficiencies are 1: bandwidth and FLOP/s are measured, not a datasheet's.
MEASURED = CostConstants(
    bandwidth_efficiency=1.0,
    flop_efficiency=1.0,
    overhead_us=0.0,
    row_overhead_us=0.0,
    token_overhead_us=0.0,
)
STEADY = Workload(
    rate=1.0,
    num_requests=32,
    prompt_median=64,
    prompt_p95=200,
    prompt_longest=384,
    output_median=24,
    output_p95=64,
    output_longest=96,
)
WORKLOADS = {
    "steady": STEADY,
    "burst": replace(STEADY, rate=1e4, num_requests=16, seed=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One workload, measured and simulated; the same figures of both."""

    workload: str
    measured: dict[str, float]
    simulated: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What was found out about this machine, and how far the simulation is from it."""

    device: Device
    constants: CostConstants
    drifts: list[float]  # of each calibration point: its time at the end over that at the start
    comparisons: list[Comparison]


def measure(write: Callable[[str], object]) -> Measurement:
    """Takes about a minute; `write` gets a line for each stage."""
    seeds = itertools.count()  # other prompts in every run, so that none is in the prefix cache
    live: dict[str, dict[str, float]] = {}
    with running_engine(CONFIG, quiet=True) as engine:
        shape = read_model_config(Path(engine.model.path) / "config.json")
        device = measure_device(shape)
        write(f"{device.name}: {device.bandwidth / 1e9:.1f} GB/s, {device.flops / 1e9:.0f} GFLOP/s")
        run_live(engine, _at_once(1), seed=next(seeds))  # first steps are slower
        before = measure_points(engine, seeds)
        for name, workload in WORKLOADS.items():
            requests = workload.draw()
            write(f"{name}: {len(requests)} requests, {requests[-1].arrival_s:.1f} s of arrivals")
            num_steps = engine.stats().num_steps
            log = run_live(engine, requests, seed=next(seeds))
            live[name] = _figures(log, engine.stats().num_steps - num_steps)
        after = measure_points(engine, seeds)
    points = {point: (before[point] + after[point]) / 2 for point in before}
    constants = fit(CostModel(shape, device, constants=MEASURED), points)
    deployment = Deployment(shape=shape, device=device, config=CONFIG, constants=constants)
    return Measurement(
        device=device,
        constants=constants,
        drifts=[after[point] / before[point] for point in before],
        comparisons=[
            Comparison(
                workload=name, measured=measured, simulated=_simulate(deployment, WORKLOADS[name])
            )
            for name, measured in live.items()
        ],
    )


def measure_device(shape: ModelShape) -> Device:
    """Bandwidth of a linear layer of one row, FLOP/s of one of many, in bfloat16 as the model's."""
    # Imported here: nothing else in the simulation needs it.
    import torch

    def seconds(rows: int, outputs: int) -> float:
        x = torch.randn(rows, shape.hidden_size, dtype=torch.bfloat16)
        weight = torch.randn(outputs, shape.hidden_size, dtype=torch.bfloat16)
        taken = []
        for _ in range(DEVICE_REPEATS):
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            taken.append(time.perf_counter() - start)
        return min(taken)  # whatever else runs only makes it slower

    num_threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        head_s = seconds(1, shape.vocab_size)
        gemm_s = seconds(GEMM_ROWS, shape.intermediate_size)
    finally:
        torch.set_num_threads(num_threads)
    head_bytes = shape.head_params * shape.element_bytes
    gemm_flops = 2 * GEMM_ROWS * shape.hidden_size * shape.intermediate_size
    return Device(
        name=f"{NUM_THREADS} thread of this CPU",
        memory_bytes=psutil.virtual_memory().total,
        bandwidth=head_bytes / head_s,
        flops=gemm_flops / gemm_s,
    )


def measure_points(engine: Engine, seeds: Iterator[int]) -> dict[tuple[int, int], float]:
    """Seconds of a step, by its sequences and the tokens of each."""
    points = {
        (rows, 1): float(np.median(run_live(engine, _at_once(rows), seed=next(seeds)).itl_s))
        for rows in CALIBRATION_ROWS
    }
    prompt = SimulatedRequest(
        arrival_s=0.0, num_prompt_tokens=CALIBRATION_CHUNK, num_output_tokens=1
    )
    chunks = [run_live(engine, [prompt], seed=next(seeds)).ttft_s[0] for _ in range(PROMPT_REPEATS)]
    points[1, CALIBRATION_CHUNK] = float(median(chunks))
    return points


def fit(cost: CostModel, points: dict[tuple[int, int], float]) -> CostConstants:
    """The overheads that explain the points of `measure_points`; `cost` has none."""
    middle = CALIBRATION_PROMPT + CALIBRATION_OUTPUT // 2

    def unexplained_s(rows: int, tokens: int) -> float:
        before = np.full(rows, middle if tokens == 1 else 0, np.int32)
        step = cost.step(before, np.full(rows, tokens, np.int32), num_samples=rows)
        return points[rows, tokens] - step.total_s

    few, many = CALIBRATION_ROWS
    one_s = unexplained_s(few, 1)
    token_s = (unexplained_s(1, CALIBRATION_CHUNK) - one_s) / (CALIBRATION_CHUNK - 1)
    row_s = (unexplained_s(many, 1) - one_s) / (many - few) - token_s
    step_s = one_s - row_s - token_s
    # The roofline alone may already be too slow for one of them: no overhead is negative.
    return replace(
        cost.constants,
        overhead_us=1e6 * max(0.0, step_s),
        row_overhead_us=1e6 * max(0.0, row_s),
        token_overhead_us=1e6 * max(0.0, token_s),
    )


def run_live(engine: Engine, requests: Sequence[SimulatedRequest], *, seed: int) -> RequestLog:
    """Serves the requests in real time. Another seed has other prompts, so nothing is cached."""
    prompts = Prompts(
        vocab_size=engine.model.vocab_size,
        longest=max(each.num_prompt_tokens for each in requests),
        seed=seed,
    )
    log = RequestLog(requests)
    done = threading.Event()
    started = time.perf_counter()

    def take(outputs: Outputs) -> None:
        log.record(time.perf_counter() - started, outputs)
        if log.num_ended == len(requests):
            done.set()

    connection = engine.connect(take)
    for number, request in enumerate(requests):
        time.sleep(max(0.0, request.arrival_s - (time.perf_counter() - started)))
        connection.add(prompts.request(number, request))
    # Also where the engine ends: it fails what lives.
    done.wait()
    connection.close()
    if error := engine.wait(0):
        raise error
    return log


def _at_once(count: int) -> list[SimulatedRequest]:
    request = SimulatedRequest(
        arrival_s=0.0,
        num_prompt_tokens=CALIBRATION_PROMPT,
        num_output_tokens=CALIBRATION_OUTPUT,
    )
    return [request] * count


def _simulate(deployment: Deployment, workload: Workload) -> dict[str, float]:
    replicas = Replicas(deployment, workload.draw())
    replicas.run()
    (stats,) = replicas.stats()
    return _figures(replicas.log, stats.num_steps)


def _figures(log: RequestLog, num_steps: int) -> dict[str, float]:
    ttft, tpot = percentiles_ms(log.ttft_s), percentiles_ms(log.tpot_s)
    duration_s = float(np.nanmax(log.last_s) - log.arrival_s[0])
    return {
        "ttft_p50_ms": ttft[0],
        "ttft_p90_ms": ttft[1],
        "tpot_p50_ms": tpot[0],
        "tpot_p90_ms": tpot[1],
        "output_tokens_per_s": float(log.num_output_tokens.sum()) / duration_s,
        "num_steps": num_steps,
    }
