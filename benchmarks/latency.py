"""`python -m benchmarks latency`: one request alone, and a start from the command on."""

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
from tqdm import tqdm

from benchmarks.compare.options import (
    make_setup,
    model_option,
    ours_option,
    read_ours,
    workload_option,
)
from benchmarks.compare.smoke import smoke_workload
from benchmarks.compare.subject import Subject, SubjectSpec, sigterm_leaves_blocks
from benchmarks.compare.subjects import specify
from benchmarks.make_model import save_tiny_llama
from benchmarks.report import (
    Figures,
    json_option,
    machine_line,
    print_table,
    smoke_option,
    write_json,
)
from benchmarks.workloads.workload import Workload, load_workload

NOTES = """\
TTFT: a run of one token. TPOT: what each later token adds, by runs of all. A start is from the
command to the answer of two tokens, in a fresh process; cold: without Lockstep's cache
(~/.cache/lockstep), with the model's files dropped from memory; warm: the same again."""
# How Lockstep is started: the engine, and options of its own.
STARTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "local": ("ours", {"launcher": "local"}),
    "ray": ("ours", {"launcher": "ray"}),
    "serve": ("ours-grpc", {"launcher": "local"}),
}


@click.command("latency")
@model_option
@workload_option
@click.option(
    "--engine",
    "engines",
    type=click.Choice(["ours", "ours-tp2", "ours-grpc", "ours-http"]),
    multiple=True,
    default=("ours", "ours-grpc"),
    show_default=True,
)
@click.option("--runs", "num_runs", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--start",
    "starts",
    type=click.Choice([*STARTS]),
    multiple=True,
    default=tuple(STARTS),
    show_default=True,
    help="By plain processes, by Ray, by `lockstep serve`.",
)
@click.option("--starts", "num_starts", type=click.IntRange(0), default=3, show_default=True)
@ours_option
@click.option("--timeout-s", type=click.FloatRange(1), default=900.0, show_default=True)
@json_option
@smoke_option
def latency(
    model: Path | None,
    paths: tuple[Path, ...],
    engines: tuple[str, ...],
    num_runs: int,
    starts: tuple[str, ...],
    num_starts: int,
    ours: tuple[str, ...],
    timeout_s: float,
    json_path: Path | None,
    smoke: bool,
) -> None:
    """Time a single stream's tokens, and starts up to the first token.

    \b
    Metrics (ENGINE as above; START: local, ray, serve):
      ttft_ms_ENGINE, tpot_ms_ENGINE           median; also _p90
      start_s_cold_START, start_s_warm_START   medians
    """  # noqa: D301 - click wants the backspace itself
    with ExitStack() as stack:
        stack.enter_context(sigterm_leaves_blocks())
        workloads = [load_workload(path) for path in paths]
        if smoke:
            model = Path(stack.enter_context(TemporaryDirectory()))
            save_tiny_llama(model)
            workloads = [smoke_workload(num_requests=1)]
            engines, starts, num_runs, num_starts = ("ours",), ("local",), 2, 1
        if model is None or len(workloads) != 1 or len(workloads[0].requests) != 1:
            raise click.UsageError("give --model and one --workload of one request, or --smoke")
        (workload,) = workloads
        if workload.num_output_tokens < 2:
            raise click.UsageError("the workload must have at least 2 tokens of output")
        click.echo(f"{machine_line()}\n{NOTES}")
        options = read_ours(ours)
        metrics: dict[str, float] = {}
        for engine in engines:
            spec = specify(engine, make_setup(model, workloads, options))
            metrics |= _single_stream(spec, workload, num_runs, timeout_s)
        for start in starts if num_starts else ():
            engine, own = STARTS[start]
            spec = specify(engine, make_setup(model, workloads, {**options, **own}))
            metrics |= _started(start, spec, model, num_starts, timeout_s)
    print_table(("metric", "value"), list(metrics.items()), title="Latencies")
    if json_path is not None:
        write_json(json_path, metrics, {"digest": workload.digest()})


def _single_stream(
    spec: SubjectSpec, workload: Workload, num_runs: int, timeout_s: float
) -> dict[str, float]:
    ttfts_s, walls_s = [], []
    with Subject(spec, timeout_s=timeout_s) as subject:
        subject.start()
        for number in tqdm(range(num_runs + 1), desc=spec.name, unit="run"):
            first = subject.run(workload.shifted(2 * number + 1).first_tokens())
            whole = subject.run(workload.shifted(2 * number + 2))
            if number:  # the first isn't counted
                ttfts_s.append(first.wall_s)
                walls_s.append(whole.wall_s)
    later = workload.num_output_tokens - 1
    ttft = Figures.of([1000 * each for each in ttfts_s])
    tpot = Figures.of([1000 * (each - median(ttfts_s)) / later for each in walls_s])
    return {
        f"ttft_ms_{spec.name}": ttft.median,
        f"ttft_ms_p90_{spec.name}": ttft.p90,
        f"tpot_ms_{spec.name}": tpot.median,
        f"tpot_ms_p90_{spec.name}": tpot.p90,
    }


def _started(
    start: str, spec: SubjectSpec, model: Path, num_starts: int, timeout_s: float
) -> dict[str, float]:
    """Cold and warm in turn."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in tqdm(range(num_starts), desc=f"start, {start}"):
        with TemporaryDirectory() as cache:
            cached = replace(spec, variables={**spec.variables, "XDG_CACHE_HOME": cache})
            forget(model.iterdir())
            for kind in seconds:
                with Subject(cached, timeout_s=timeout_s) as subject:
                    subject.start()
                seconds[kind].append(subject.startup_s)
    return {f"start_s_{kind}_{start}": median(each) for kind, each in seconds.items()}


def forget(paths: Iterable[Path]) -> None:
    """Drops files from the kernel's memory, so far as nothing else uses them."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
