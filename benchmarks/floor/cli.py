"""`python -m benchmarks floor`: the least time that workloads could take on this machine."""

from pathlib import Path

import click

from benchmarks.floor.rates import Rates, measure_rates
from benchmarks.floor.work import work_of
from benchmarks.report import json_option, machine_line, print_table, write_json
from benchmarks.simulate.model_shape import read_model_config
from benchmarks.workloads.workload import load_workload


def show_rates(rates: Rates) -> dict[str, float]:
    """Prints them; returns the metrics."""
    rows, metrics = [], {}
    for (dtype, shape), rate in rates.flops_per_s.items():
        name = "x".join(map(str, shape))
        rows.append((dtype, name, rate / 1e9))
        metrics[f"gflops_per_s_{dtype}_{name}"] = rate / 1e9
    print_table(("dtype", "rows x inner x outputs", "GFLOP/s"), rows, title="Matrix products")
    dtype, rate = rates.best
    click.echo(f"best {rate / 1e9:.0f} GFLOP/s, {dtype}; read {rates.bytes_per_s / 1e9:.1f} GB/s")
    return metrics | {"read_gb_per_s": rates.bytes_per_s / 1e9}


@click.command("floor")
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="Its folder; config.json is read.",
)
@click.option(
    "--workload",
    "paths",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    required=True,
)
@json_option
def floor(model: Path, paths: tuple[Path, ...], json_path: Path | None) -> None:
    """Measure matrix products and memory, and what workloads take of them at least.

    \b
    Metrics (DTYPE: bfloat16, float32; NAME: the workload's):
      gflops_per_s_DTYPE_ROWSxINNERxOUTPUTS, read_gb_per_s
      floor_s_NAME, gflop_NAME, gb_NAME
    """  # noqa: D301 - click wants the backspace itself
    shape = read_model_config(model / "config.json")
    workloads = [load_workload(path) for path in paths]
    click.echo(machine_line())
    rates = measure_rates()
    metrics = show_rates(rates)
    rows = []
    for workload in workloads:
        work = work_of(workload, shape)
        floor_s = work.floor_s(flops_per_s=rates.best[1], bytes_per_s=rates.bytes_per_s)
        parts = (work.prefill_flops / 1e9, work.decode_flops / 1e9, work.num_bytes / 1e9)
        rows.append((workload.name, *parts, floor_s))
        metrics[f"floor_s_{workload.name}"] = floor_s
        metrics[f"gflop_{workload.name}"] = work.flops / 1e9
        metrics[f"gb_{workload.name}"] = work.num_bytes / 1e9
    headers = ("workload", "prefill GFLOP", "decode GFLOP", "GB", "floor s")
    print_table(headers, rows, title=f"What {shape.name} takes at least")
    if json_path is not None:
        write_json(json_path, metrics)
