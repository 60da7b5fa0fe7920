"""`python -m benchmarks publish`: what giving frontends their tokens costs the engine's thread."""

import multiprocessing
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import click
import grpc

from benchmarks.report import (
    Figures,
    json_option,
    machine_line,
    print_table,
    smoke_option,
    write_json,
)
from benchmarks.scheduler.cases import STEP_TOKENS, VOCAB_SIZE, DecodeCase
from benchmarks.scheduler.ours import MAX_MODEL_LEN, Driver, make_layout, make_params, make_result
from benchmarks.scheduler.timing import frozen_heap
from protos import engine_pb2, engine_pb2_grpc
from protos.auth import bearer
from runtime import engine_codec
from runtime.engine import Engine
from runtime.engine_service import EngineServer
from runtime.request import ModelInfo, Request
from runtime.scheduling.sampler_inputs import SamplerInputs
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks
from runtime.structured import NoCompiler

GOAL_US = 500.0
PROMPT = array("i", range(1, 33))
WARM_UP_STEPS = 32
TIMEOUT_S = 60.0
# Seconds between two messages that a frontend reads; None: it reads none once its requests run.
PACES = {"at once": 0.0, "slowly": 0.1, "not at all": None}
NOTES = """\
The real engine and its port, frontends in processes of their own, each with its part of the
streams; a worker group that computes nothing and takes its time. Figures are the engine's own step
timings: publish is applying the result and giving each frontend its tokens; disturbed by whatever
else runs on the machine. frontends read: how fast they take what is sent."""


class PacedExecutor:
    """Steps that take `step_s`, in which the interpreter is free, as with workers elsewhere.

    `on_step` is called when the engine begins to wait for one, on its thread.
    """

    def __init__(self, step_s: float) -> None:
        self.on_step: Callable[[], object] = lambda: None
        self._step_s = step_s
        self._free_at = 0.0
        self._steps: deque[tuple[float, StepPlan]] = deque()  # with when they end

    def submit(self, plan: StepPlan) -> None:
        self._free_at = max(self._free_at, time.monotonic()) + self._step_s
        self._steps.append((self._free_at, plan))

    def sample(self, step_id: int, inputs: SamplerInputs, masks: TokenMasks) -> None:
        raise AssertionError(f"step {step_id} defers sampling, and no stream asks for that")

    def result(self) -> StepResult:
        self.on_step()
        end, plan = self._steps.popleft()
        time.sleep(max(0.0, end - time.monotonic()))
        return make_result(plan)

    def close(self) -> None:
        """Nothing runs."""


class Watch:
    """What publishing took in each step in which all streams got a token, in us."""

    def __init__(self, engine: Engine, num_streams: int, num_steps: int) -> None:
        self.micros: list[float] = []
        self.done: SimpleQueue[None] = SimpleQueue()
        self._engine = engine
        self._num_streams = num_streams
        self._num_steps = num_steps
        self._num_full_steps = 0
        self._before_s = 0.0

    def on_step(self) -> None:
        """Looks at the step before this one."""
        stats = self._engine.stats()
        total_s = stats.step_s.publish.sum
        step_s, self._before_s = total_s - self._before_s, total_s
        last = stats.last_step
        if last is None or last.num_decode_sequences < self._num_streams:
            return
        self._num_full_steps += 1
        if WARM_UP_STEPS < self._num_full_steps <= WARM_UP_STEPS + self._num_steps:
            self.micros.append(step_s * 1e6)
            if len(self.micros) == self._num_steps:
                self.done.put(None)


def read_stream(
    port: int, token: str, num_streams: int, pace_s: float | None, ended: Connection
) -> None:
    """A frontend: asks for its streams, then reads at its pace until `ended` closes."""
    params = make_params()
    adds = [
        engine_codec.encode_request(
            Request(request_id=number, prompt_token_ids=PROMPT, params=params, seed=number)
        )
        for number in range(1, num_streams + 1)
    ]
    leaving: SimpleQueue[None] = SimpleQueue()

    def messages() -> Iterator[engine_pb2.FrontendMessage]:
        yield from (engine_pb2.FrontendMessage(add=add) for add in adds)
        leaving.get()

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
        answers = stub.Connect(messages(), metadata=bearer(token))
        next(answers)
        while not ended.poll(pace_s):
            next(answers)
        answers.cancel()
        leaving.put(None)


@contextmanager
def frontends(
    server: EngineServer, num_frontends: int, num_streams: int, pace_s: float | None
) -> Iterator[None]:
    """Processes that share the streams between them."""
    context = multiprocessing.get_context("spawn")
    shares = [
        num_streams // num_frontends + (i < num_streams % num_frontends)
        for i in range(num_frontends)
    ]
    pipes = [context.Pipe(duplex=False) for _ in shares]
    processes = [
        context.Process(target=read_stream, args=(server.port, server.token, share, pace_s, theirs))
        for share, (theirs, _) in zip(shares, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for _, ours in pipes:
            ours.send(None)
        for process in processes:
            process.join(TIMEOUT_S)


def measure(
    *, num_streams: int, num_frontends: int, num_steps: int, step_s: float, pace_s: float | None
) -> list[float]:
    """What publishing took in each of so many steps, in us."""
    case = DecodeCase(
        running=num_streams,
        waiting=0,
        prefix_cache=True,
        block_size=16,
        context=len(PROMPT),
        num_steps=num_steps,
    )
    driver = Driver(
        make_layout(case), prefix_cache=True, max_num_seqs=num_streams, step_tokens=STEP_TOKENS
    )
    executor = PacedExecutor(step_s)
    engine = Engine(
        model=ModelInfo(
            name="none",
            path="",
            architecture="None",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=(),
            tp_size=1,
        ),
        scheduler=driver.scheduler,
        executor=executor,
        compiler=NoCompiler("there is no tokenizer"),
    )
    watch = Watch(engine, num_streams, num_steps)
    executor.on_step = watch.on_step
    server = EngineServer(engine, secrets.token_urlsafe())
    engine.start()
    server.start()
    try:
        with frozen_heap(), frontends(server, num_frontends, num_streams, pace_s):
            watch.done.get(timeout=TIMEOUT_S + 10 * num_steps * (step_s + 0.01))
    finally:
        engine.stop()
        server.stop(grace_s=1.0)
    return watch.micros


@click.command("publish")
@click.option("--streams", type=click.IntRange(1), default=256, show_default=True)
@click.option("--frontends", "num_frontends", type=click.IntRange(1), default=2, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=1000, show_default=True)
@click.option("--step-ms", type=click.FloatRange(0), default=10.0, show_default=True)
@json_option
@smoke_option
def publish(
    streams: int,
    num_frontends: int,
    steps: int,
    step_ms: float,
    json_path: Path | None,
    smoke: bool,
) -> None:
    """Time how long the engine's thread publishes a step's tokens, whatever the frontends do.

    \b
    Metrics (PACE: at_once, slowly, not_at_all):
      publish_us_PACE          median; also _p99, _max
    """  # noqa: D301 - click wants the backspace itself
    if smoke:
        streams, steps, step_ms = 4, 5, 1.0
    click.echo(f"{machine_line()}; {streams} streams, {num_frontends} frontends, {steps} steps")
    click.echo(NOTES)
    rows: list[tuple[object, ...]] = []
    metrics: dict[str, float] = {}
    for name, pace_s in PACES.items():
        figures = Figures.of(
            measure(
                num_streams=streams,
                num_frontends=num_frontends,
                num_steps=steps,
                step_s=step_ms / 1000,
                pace_s=pace_s,
            )
        )
        verdict = "yes" if figures.p99 < GOAL_US else "no"
        rows.append((name, figures.median, figures.p99, figures.max, GOAL_US, verdict))
        key = f"publish_us_{name.replace(' ', '_')}"
        metrics |= {key: figures.median, f"{key}_p99": figures.p99, f"{key}_max": figures.max}
    headers = ("frontends read", "median", "p99", "max", "goal", "p99 below it")
    print_table(headers, rows, title="Publishing a step, us")
    if json_path is not None:
        write_json(json_path, metrics)
