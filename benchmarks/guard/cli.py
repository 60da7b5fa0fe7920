"""`python -m benchmarks guard`: fails where the engine has become slower."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
from tqdm import tqdm

from benchmarks.compare.options import make_setup
from benchmarks.compare.pairs import measure_pairs
from benchmarks.compare.smoke import smoke_workload
from benchmarks.compare.subject import Subject, SubjectSpec, sigterm_leaves_blocks
from benchmarks.compare.subjects import ROOT, specify
from benchmarks.make_model import GUARD_VOCABULARY, save_guard_llama, save_tiny_llama
from benchmarks.report import json_option, machine_line, print_table, smoke_option, write_json
from benchmarks.workloads.shapes import make_uniform
from benchmarks.workloads.workload import Workload

BOUNDS = Path(__file__).with_name("bounds.json")
# Processors differ more in bfloat16 than in anything else: a bound is to hold on all of them.
DTYPE = "float32"
MAX_ROWS = 512  # the engine's own budget of a step
NOTES = """\
speed: the engine's, as a share of that of the model's matrix products alone, as a plain loop of
torch runs them; pair by pair in this run, so that the machine's own speed is in neither."""


def guard_workloads() -> list[Workload]:
    return [
        replace(
            make_uniform(
                model="guard",
                vocab_size=GUARD_VOCABULARY,
                num_requests=num_requests,
                prompt_len=64,
                output_len=output_len,
            ),
            name=name,
        )
        for name, num_requests, output_len in (("batch", 16, 32), ("single", 1, 64))
    ]


def too_slow(ratios: Mapping[str, Sequence[float]], bounds: Mapping[str, float]) -> list[str]:
    """A message for each workload whose median is below its bound. Raises KeyError: it has none."""
    return [
        f"{name}: the engine has {median(values):.3f} of the speed of its matrix products, and "
        f"must have {bounds[name]:g} at least (benchmarks/guard/bounds.json); pairs: "
        + ", ".join(f"{value:.3f}" for value in values)
        for name, values in ratios.items()
        if median(values) < bounds[name]
    ]


@click.command("guard")
@click.option("--pairs", "num_pairs", type=click.IntRange(1), default=7, show_default=True)
@click.option(
    "--bounds",
    "bounds_path",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=BOUNDS,
    help="JSON: the least ratio of each workload. Those of the repository where unset.",
)
@click.option("--timeout-s", type=click.FloatRange(1), default=600.0, show_default=True)
@json_option
@smoke_option
def guard(
    num_pairs: int, bounds_path: Path, timeout_s: float, json_path: Path | None, smoke: bool
) -> None:
    """Compare the engine with its own matrix products; end with 1 where it has become slower.

    \b
    Metrics (NAME: batch, single):
      speed_NAME    median of pairs; also speed_min, speed_max
    """  # noqa: D301 - click wants the backspace itself
    bounds: dict[str, float] = json.loads(bounds_path.read_text("utf-8"))
    workloads = guard_workloads()
    with TemporaryDirectory() as place:
        model = Path(place)
        if smoke:
            save_tiny_llama(model)
            workloads, num_pairs = [smoke_workload()], 1
            bounds = {each.name: 0.0 for each in workloads}
        else:
            save_guard_llama(model)
        click.echo(f"{machine_line()}; {num_pairs} pairs\n{NOTES}")
        ratios = _measured(model, workloads, num_pairs, timeout_s)
    rows = [
        (name, median(values), min(values), max(values), bounds[name])
        for name, values in ratios.items()
    ]
    print_table(("workload", "speed", "least", "most", "bound"), rows, title="Engine")
    if json_path is not None:
        metrics = {}
        for name, values in ratios.items():
            metrics[f"speed_{name}"] = median(values)
            metrics[f"speed_min_{name}"] = min(values)
            metrics[f"speed_max_{name}"] = max(values)
        write_json(json_path, metrics, {"bounds": bounds, "ratios": dict(ratios)})
    if slow := too_slow(ratios, bounds):
        for line in slow:
            click.echo(line, err=True)
        sys.exit(1)


def _measured(
    model: Path, workloads: Sequence[Workload], num_pairs: int, timeout_s: float
) -> dict[str, list[float]]:
    """By workload: the engine's speed over that of the products, pair by pair."""
    ours = specify(
        "ours", make_setup(model, workloads, {"dtype": DTYPE, "max_num_batched_tokens": MAX_ROWS})
    )
    ratios = {}
    with (
        sigterm_leaves_blocks(),
        Subject(ours, timeout_s=timeout_s) as engine,
        Subject(_products(model), timeout_s=timeout_s) as products,
    ):
        engine.start()
        products.start()
        for workload in workloads:
            with tqdm(total=2 * (num_pairs + 1), desc=workload.name) as bar:
                pairs = measure_pairs(
                    engine, products, workload, num_pairs=num_pairs, on_run=bar.update
                )
            ratios[workload.name] = pairs.ratios
    return ratios


def _products(model: Path) -> SubjectSpec:
    options = {
        "config": str(model / "config.json"),
        "dtype": DTYPE,
        "max_rows": MAX_ROWS,
        "threads": len(os.sched_getaffinity(0)),
    }
    return SubjectSpec(
        name="products",
        command=(sys.executable, "-m", "benchmarks.guard.products", json.dumps(options)),
        variables={},
        folder=ROOT,
        pauses=True,
    )
