"""`python -m benchmarks pauses`: what holds up steps while thousands of requests wait."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter_ns, thread_time_ns

import click
import numpy as np

from benchmarks.publish import PacedExecutor
from benchmarks.report import (
    Figures,
    json_option,
    machine_line,
    print_table,
    smoke_option,
    write_json,
)
from benchmarks.scheduler.cases import STEP_TOKENS, VOCAB_SIZE, DecodeCase
from benchmarks.scheduler.ours import MAX_MODEL_LEN, Driver, make_layout, make_prompt
from benchmarks.scheduler.timing import frozen_heap, num_involuntary_switches
from runtime.collector import Sweep
from runtime.connection import Connection
from runtime.engine import Engine
from runtime.request import ModelInfo, Request
from runtime.sampling_params import LOCKSTEP_DEFAULTS, SamplingParams
from runtime.structured import NoCompiler

PROMPT_TOKENS = 512
# Outputs differ in length, so that in each step about as many end, and as many come.
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 32, 96
WARM_UP_STEPS = 100
# default: as Python starts with it; frozen: after start-up; swept: so, and in waits, as `serve`.
COLLECTORS = ("default", "frozen", "swept")
NOTES = """\
The real engine, stepped by the benchmark, over workers that take no time; who ends is followed by
one that waits, and by a new request at the end of the queue. A gap is from the end of one step to
the end of the next, new requests included, without what is done while the workers run; quiet: of
those in which the system gave the core to nobody else. Collections are in CPU time of their thread:
the longest on the way from step to step, the longest while the workers run. default: the collector
as Python starts with it; frozen: what start-up made is frozen, and the oldest generation left
alone; swept: so, and the young ones are collected while the workers run, as in `lockstep serve`.
Medians of the repeats, with the least and the most."""


class Watch:
    """The collector's pauses, and the time in which the workers have all that they can get."""

    def __init__(self, on_wait: Callable[[], object]) -> None:
        self.in_steps: list[float] = []  # us
        self.in_waits: list[float] = []  # us
        self.waited_ns = 0  # in all
        self._on_wait = on_wait
        self._pauses = self.in_steps
        self._started = 0

    def on_wait(self) -> None:
        started = perf_counter_ns()
        self._pauses = self.in_waits
        self._on_wait()
        self._pauses = self.in_steps
        self.waited_ns += perf_counter_ns() - started

    @contextmanager
    def watching(self) -> Iterator[None]:
        gc.callbacks.append(self._see)
        try:
            yield
        finally:
            gc.callbacks.remove(self._see)

    def _see(self, phase: str, info: dict[str, int]) -> None:
        now = thread_time_ns()
        if phase == "start":
            self._started = now
        else:
            self._pauses.append((now - self._started) / 1e3)


class Queue:
    """Keeps so many requests waiting."""

    def __init__(self, driver: Driver, connection: Connection, num_waiting: int) -> None:
        self._waiting = driver.scheduler.waiting
        self._connection = connection
        self._num_waiting = num_waiting
        self._request_ids = count(1)
        self._generator = np.random.default_rng(0)

    def fill(self) -> None:
        for _ in range(self._num_waiting - len(self._waiting)):
            request_id = next(self._request_ids)
            length = MIN_OUTPUT_TOKENS + request_id % (MAX_OUTPUT_TOKENS - MIN_OUTPUT_TOKENS)
            request = Request(
                request_id=request_id,
                prompt_token_ids=make_prompt(self._generator, PROMPT_TOKENS),
                params=SamplingParams(max_tokens=length).complete(LOCKSTEP_DEFAULTS),
                seed=request_id,
            )
            self._connection.add(request)


def make_engine(driver: Driver, on_wait: Callable[[], object]) -> Engine:
    model = ModelInfo(
        name="none",
        path="",
        architecture="None",
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(),
        tp_size=1,
    )
    return Engine(
        model=model,
        scheduler=driver.scheduler,
        executor=PacedExecutor(0.0),
        compiler=NoCompiler("there is no tokenizer"),
        on_wait=on_wait,
    )


def measure(collector: str, *, running: int, waiting: int, num_steps: int) -> dict[str, float]:
    """One run: metrics without the collector's name."""
    case = DecodeCase(
        running=running,
        waiting=waiting,
        prefix_cache=True,
        block_size=16,
        context=PROMPT_TOKENS,
        num_steps=num_steps,
    )
    driver = Driver(
        make_layout(case), prefix_cache=True, max_num_seqs=running, step_tokens=STEP_TOKENS
    )
    watch = Watch(Sweep() if collector == "swept" else lambda: None)
    engine = make_engine(driver, watch.on_wait)
    queue = Queue(driver, engine.connect(lambda outputs: None), waiting)
    gaps, quiet = [], []
    gc.collect()  # what the run before has left
    with nullcontext() if collector == "default" else frozen_heap(), watch.watching():
        for index in range(WARM_UP_STEPS + num_steps):
            if index == WARM_UP_STEPS:
                watch.in_steps.clear()
                watch.in_waits.clear()
            switches = num_involuntary_switches()
            waited, started = watch.waited_ns, perf_counter_ns()
            queue.fill()
            engine.run_submitted()
            engine.step()
            gap = (perf_counter_ns() - started - (watch.waited_ns - waited)) / 1e3
            if index >= WARM_UP_STEPS:
                gaps.append(gap)
                if num_involuntary_switches() == switches:
                    quiet.append(gap)
    figures, undisturbed = Figures.of(gaps), Figures.of(quiet or gaps)
    return {
        "gap_us": figures.median,
        "gap_us_p99": figures.p99,
        "gap_us_max": figures.max,
        "gap_us_max_quiet": undisturbed.max,
        "num_collections": len(watch.in_steps) + len(watch.in_waits),
        "collection_us_in_steps": max(watch.in_steps, default=0.0),
        "collection_us_in_waits": max(watch.in_waits, default=0.0),
    }


@click.command("pauses")
@click.option("--running", type=click.IntRange(1), default=256, show_default=True)
@click.option("--waiting", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=2000, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@json_option
@smoke_option
def pauses(
    running: int, waiting: int, steps: int, repeats: int, json_path: Path | None, smoke: bool
) -> None:
    """Time the engine's steps and the garbage collector's pauses in them, with a long queue.

    \b
    Metrics (COLLECTOR: default, frozen, swept), medians of the repeats:
      gap_us_COLLECTOR                 median; also gap_us_p99_, gap_us_max_, gap_us_max_quiet_
      num_collections_COLLECTOR
      collection_us_in_steps_COLLECTOR, collection_us_in_waits_COLLECTOR   the longest
    """  # noqa: D301 - click wants the backspace itself
    if smoke:
        running, waiting, steps, repeats = 4, 20, 70, 1
    click.echo(f"{machine_line()}; {running} run, {waiting} wait, {repeats} times {steps} steps")
    click.echo(NOTES)
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(repeats):
        for collector in COLLECTORS:
            run = measure(collector, running=running, waiting=waiting, num_steps=steps)
            for quantity, value in run.items():
                found[quantity][collector].append(value)
    rows = [(name, *(_spread(runs[each]) for each in COLLECTORS)) for name, runs in found.items()]
    print_table(("", *COLLECTORS), rows, title="Gaps between steps, and collections in them")
    click.echo(f"\n{machine_line()}")
    if json_path is not None:
        metrics = {
            f"{quantity}_{collector}": float(median(values))
            for quantity, runs in found.items()
            for collector, values in runs.items()
        }
        write_json(json_path, metrics)


def _spread(values: list[float]) -> str:
    return f"{median(values):.0f} ({min(values):.0f}-{max(values):.0f})"
