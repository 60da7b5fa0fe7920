"""`python -m benchmarks demo`: serves the embedded model and streams four prompts at once.

Starts `lockstep serve` as a process of its own and talks to it as any gRPC client would, shows the
texts as they grow, prints one line of figures, ends the server and looks for anything left of it.
"""

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import grpc
import grpc.aio
import psutil

from benchmarks.demo_prompts import PROMPTS
from benchmarks.terminal import Screen, open_screen
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import Metadata, bearer

SERVE = (
    *(sys.executable, "-m", "runtime", "serve"),
    *("--model=demo", "--tp=2", "--device=cpu", "--launcher=ray"),
    *("--port=0", "--http-port=0"),
)
API_KEY_VARIABLE = "LOCKSTEP_API_KEY"
READY = re.compile(r"serving \S+ on (\S+:\d+) \(gRPC\)")
MAX_TOKENS = 64
STOP_TIMEOUT_S = 15.0
GONE_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One stream. Times are of `time.perf_counter`, in seconds."""

    sent_s: float
    first_s: float
    last_s: float
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


class DemoError(Exception):
    """The demo can't go on, or found something left over. The message says what."""


@contextmanager
def served_model(command: Sequence[str], scratch: Path) -> Iterator[str]:
    """The server while the block runs; yields its address. It has `scratch` for temporary files.

    Raises DemoError: it ended early, ended with an error, or left a process or file behind.
    """
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
        # Ctrl-C reaches the demo, which ends the server.
        start_new_session=True,
    )
    assert server.stdout is not None
    with server.stdout:
        try:
            yield read_address(server.stdout)
        finally:
            with undisturbed():
                left = end(server)
    if left:
        raise DemoError(f"processes left over: {', '.join(left)}")
    if server.returncode != 0:
        raise DemoError(f"`lockstep serve` ended with code {server.returncode}")
    if files := sorted(path.name for path in scratch.iterdir()):
        raise DemoError(f"temporary files left over: {', '.join(files)}")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores Ctrl-C and SIGTERM: a second one must not cut short what ends everything anyway."""
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read_address(lines: Iterator[str]) -> str:
    """Waits for the line that says where the server listens; shows what comes before it."""
    for line in lines:
        if found := READY.search(line.rstrip()):
            return found[1]
        print(line, end="", flush=True)
    raise DemoError("`lockstep serve` ended before it was ready")


def end(server: subprocess.Popen[str]) -> list[str]:
    """Asks the server to end and waits; returns what is left of it after that, killed."""
    started = psutil.Process(server.pid).children(recursive=True)
    server.terminate()
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    _, left = psutil.wait_procs(started + orphans(), GONE_TIMEOUT_S)
    return kill(left)


def orphans() -> list[psutil.Process]:
    """Processes that no longer hang below the server, known by the key in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            key = process.environ().get(API_KEY_VARIABLE)
        except psutil.Error:
            continue  # it is gone by now, or somebody else's
        if key == os.environ[API_KEY_VARIABLE] and process.pid != os.getpid():
            found.append(process)
    return found


def kill(processes: Sequence[psutil.Process]) -> list[str]:
    """Returns the names of those that still ran, for the report."""
    names = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                names.append(f"{process.pid} {process.name()}")
                process.kill()
        except psutil.NoSuchProcess:
            continue  # it ended just now
    return names


async def stream_prompts(address: str, key: Metadata, screen: Screen) -> str:
    """Streams all prompts at once; returns the line of figures."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        before = await stats_of(stub, key)
        started = time.perf_counter()
        timings = await asyncio.gather(
            *(stream(stub, key, index, prompt, screen) for index, prompt in enumerate(PROMPTS))
        )
        elapsed_s = time.perf_counter() - started
        after = await stats_of(stub, key)
    screen.close()
    return figures(timings, elapsed_s, before, after)


async def stats_of(stub: inference_pb2_grpc.InferenceStub, key: Metadata) -> common_pb2.EngineStats:
    response = await stub.GetStats(inference_pb2.GetStatsRequest(), metadata=key)
    (engine,) = response.engines
    stats: common_pb2.EngineStats = engine.stats
    return stats


async def stream(
    stub: inference_pb2_grpc.InferenceStub,
    key: Metadata,
    index: int,
    prompt: str,
    screen: Screen,
) -> Timing:
    params = common_pb2.SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0.7, top_p=0.9, seed=index, ignore_eos=True
    )
    request = inference_pb2.GenerateRequest(
        request_id=f"demo-{index}", text=prompt, sampling_params=params
    )
    sent_s = time.perf_counter()
    arrivals: list[float] = []
    async for response in stub.Generate(request, metadata=key):
        arrivals += [time.perf_counter()] * len(response.token_ids)
        screen.add(index, response.text)
    return Timing(sent_s=sent_s, first_s=arrivals[0], last_s=arrivals[-1], num_tokens=len(arrivals))


def figures(
    timings: Sequence[Timing],
    elapsed_s: float,
    before: common_pb2.EngineStats,
    after: common_pb2.EngineStats,
) -> str:
    num_tokens = sum(timing.num_tokens for timing in timings)
    num_steps = after.num_steps - before.num_steps
    num_sequences = after.num_scheduled_sequences - before.num_scheduled_sequences
    return (
        f"TTFT {1e3 * median(timing.ttft_s for timing in timings):.0f} ms, "
        f"TPOT {1e3 * median(timing.tpot_s for timing in timings):.0f} ms (medians), "
        f"{num_tokens / elapsed_s:.1f} tokens/s, "
        f"{num_steps} steps, mean batch {num_sequences / max(1, num_steps):.1f}"
    )


def run() -> None:
    started = time.perf_counter()
    key = bearer(os.environ[API_KEY_VARIABLE])
    titles = [shortened(prompt) for prompt in PROMPTS]
    # A short name: Ray keeps sockets below it, whose paths may have 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="ls") as scratch,
        served_model(SERVE, Path(scratch)) as address,
    ):
        print(f"ready after {time.perf_counter() - started:.1f} s on {address}\n", flush=True)
        line = asyncio.run(stream_prompts(address, key, open_screen(titles, sys.stdout)))
        print(f"\n{line}", flush=True)
    print(f"stopped cleanly; {time.perf_counter() - started:.1f} s in all", flush=True)


def shortened(prompt: str) -> str:
    words = prompt.split()
    return f"{len(words)} words: ... {' '.join(words[-9:])}"


@click.command("demo")
def demo() -> None:
    """Serve the embedded model on two ranks and stream four prompts.

    Exits with 1 where something failed or was left over.
    """
    # The server knows its key from the environment, and so does whatever it starts.
    os.environ[API_KEY_VARIABLE] = secrets.token_urlsafe(24)
    # The default action would leave the server running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run()
    except KeyboardInterrupt:
        sys.exit("interrupted; everything has ended")
    except DemoError as error:
        sys.exit(f"demo: {error}")
    except grpc.aio.AioRpcError as error:
        sys.exit(f"demo: {error.code().name}: {error.details()}")
