"""`python -m benchmarks throughput`: one engine on workloads, again and again."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
from tqdm import tqdm

from benchmarks.compare.options import (
    by_prefix_caching,
    make_setup,
    model_option,
    ours_option,
    read_ours,
    workload_option,
)
from benchmarks.compare.smoke import smoke_workload
from benchmarks.compare.subject import Subject, Turn, sigterm_leaves_blocks
from benchmarks.compare.subjects import specify
from benchmarks.make_model import save_tiny_llama
from benchmarks.report import json_option, machine_line, print_table, smoke_option, write_json
from benchmarks.workloads.workload import Workload, load_workload

ENGINES = ("ours", "ours-tp2", "ours-grpc", "ours-http")
HEADERS = (
    *("workload", "wall s", "least", "most", "output tokens/s", "all tokens/s", "memory GB"),
)


@click.command("throughput")
@model_option
@workload_option
@click.option("--engine", type=click.Choice(ENGINES), default="ours", show_default=True)
@click.option("--runs", "num_runs", type=click.IntRange(1), default=5, show_default=True)
@ours_option
@click.option("--timeout-s", type=click.FloatRange(1), default=900.0, show_default=True)
@json_option
@smoke_option
def throughput(
    model: Path | None,
    paths: tuple[Path, ...],
    engine: str,
    num_runs: int,
    ours: tuple[str, ...],
    timeout_s: float,
    json_path: Path | None,
    smoke: bool,
) -> None:
    """Run workloads on Lockstep alone: medians of runs after one that isn't counted.

    \b
    Metrics (NAME: the workload's):
      wall_s_NAME                             median; also wall_s_min, wall_s_max
      output_tokens_per_s_, all_tokens_per_s_NAME, memory_gb_NAME
      start_s                                 from the command to the first answer
    """  # noqa: D301 - click wants the backspace itself
    with ExitStack() as stack:
        stack.enter_context(sigterm_leaves_blocks())
        workloads = [load_workload(path) for path in paths]
        if smoke:
            model = Path(stack.enter_context(TemporaryDirectory()))
            save_tiny_llama(model)
            workloads, num_runs = [smoke_workload()], 2
        if model is None or not workloads:
            raise click.UsageError("give --model and --workload, or --smoke")
        click.echo(f"{machine_line()}; {engine}, {num_runs} runs")
        found: dict[Workload, list[Turn]] = {}
        metrics: dict[str, float] = {}
        for group in by_prefix_caching(workloads):
            spec = specify(engine, make_setup(model, group, read_ours(ours)))
            with Subject(spec, timeout_s=timeout_s) as subject:
                subject.start()
                metrics.setdefault("start_s", subject.startup_s)
                for workload in group:
                    found[workload] = run_again(subject, workload, num_runs)
    rows = []
    for workload, turns in found.items():
        metrics |= metrics_of(workload, turns)
        name = workload.name
        keys = ("wall_s", "wall_s_min", "wall_s_max", "output_tokens_per_s", "all_tokens_per_s")
        rows.append((name, *(metrics[f"{key}_{name}"] for key in (*keys, "memory_gb"))))
    print_table(HEADERS, rows, title=f"{engine}, ready after {metrics['start_s']:.1f} s")
    if json_path is not None:
        digests = {each.name: each.digest() for each in found}
        write_json(json_path, metrics, {"engine": engine, "digests": digests})


def run_again(subject: Subject, workload: Workload, num_runs: int) -> list[Turn]:
    """After one that isn't counted; each has token ids of its own."""
    distances = tqdm(range(1, num_runs + 2), desc=workload.name, unit="run")
    return [subject.run(workload.shifted(each)) for each in distances][1:]


def metrics_of(workload: Workload, turns: Sequence[Turn]) -> dict[str, float]:
    walls_s = [turn.wall_s for turn in turns]
    wall_s = median(walls_s)
    output = workload.num_output_tokens
    metrics = {
        "wall_s": wall_s,
        "wall_s_min": min(walls_s),
        "wall_s_max": max(walls_s),
        "output_tokens_per_s": output / wall_s,
        "all_tokens_per_s": (workload.num_prompt_tokens + output) / wall_s,
        "memory_gb": max(turn.memory_bytes for turn in turns) / 1e9,
    }
    return {f"{name}_{workload.name}": value for name, value in metrics.items()}
