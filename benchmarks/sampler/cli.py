"""`python -m benchmarks sampler`: the cells that are run, and what comes out."""

from pathlib import Path

import click
import torch

from benchmarks.report import (
    Figures,
    json_option,
    machine_line,
    print_table,
    smoke_option,
    write_json,
)
from benchmarks.sampler.cases import HISTORY_TOKENS, KINDS, make_logits
from benchmarks.sampler.measure import Measurement, measure, read_gb_per_s

NOTES = f"""\
A call is Sampler.sample over float32 logits, from raw logits to token ids. ratio: over one argmax
over the same logits, which ran right before it; median of the rounds, p10 and p90 after it. over
floor: the floor is reading the logits once at the measured bandwidth. flat: normal logits; peaked:
a few tokens have nearly all of the mass. full: temperature, top-k 50, top-p 0.9, min-p, all three
penalties over {HISTORY_TOKENS} tokens a row, logprobs 5."""


@click.command("sampler")
@click.option(
    "--batch", type=click.IntRange(1), multiple=True, default=(1, 16, 64), show_default=True
)
@click.option(
    "--vocab",
    type=click.IntRange(100),
    multiple=True,
    default=(32_000, 262_144),
    show_default=True,
)
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True)
@click.option("--threads", type=click.IntRange(1), help="Of torch; its own choice where unset.")
@json_option
@smoke_option
def sampler(
    batch: tuple[int, ...],
    vocab: tuple[int, ...],
    rounds: int,
    threads: int | None,
    json_path: Path | None,
    smoke: bool,
) -> None:
    """Time sampling against one argmax over the same logits.

    Cells: rows by vocabulary, for each thing that rows may ask for.

    \b
    Metrics (KIND: greedy, temperature, top_p_peaked, top_p_flat, top_k_top_p, full, mixed;
    CELL: 64x262144):
      KIND_over_argmax_CELL    median of the rounds; also _p90
      KIND_us_CELL, argmax_us_CELL
      floor_us_CELL, read_gb_per_s
      threads, rounds
    """  # noqa: D301 - click wants the backspace itself
    if smoke:
        batch, vocab, rounds = (1, 3), (700,), 2
    if threads is not None:
        torch.set_num_threads(threads)
    num_threads = torch.get_num_threads()
    click.echo(f"{machine_line()}; {num_threads} threads of torch, {rounds} rounds")
    click.echo(NOTES)
    metrics: dict[str, float] = {"read_gb_per_s": 0.0}
    for vocab_size in vocab:
        for num_rows in batch:
            # Whatever else runs makes it look slower, never faster.
            bandwidth = max(metrics["read_gb_per_s"], read_gb_per_s(1 << 20 if smoke else 1 << 28))
            metrics["read_gb_per_s"] = bandwidth
            metrics |= run_cell(num_rows, vocab_size, rounds, bandwidth)
    click.echo(f"\n{machine_line()}")
    if json_path is not None:
        write_json(json_path, metrics | {"threads": num_threads, "rounds": rounds})


def run_cell(num_rows: int, vocab_size: int, num_rounds: int, bandwidth: float) -> dict[str, float]:
    """Prints the cell's table and returns its metrics."""
    cell = f"{num_rows}x{vocab_size}"
    floor = num_rows * vocab_size * 4 / bandwidth / 1e3
    metrics, rows, argmax_us = {f"floor_us_{cell}": floor}, [], []
    logits = {peaked: make_logits(num_rows, vocab_size, peaked=peaked) for peaked in (False, True)}
    for kind in KINDS:
        measured = measure(kind, logits[kind.peaked], num_rounds=num_rounds)
        ours, ratio = Figures.of(measured.sample_us), Figures.of(measured.ratios)
        argmax_us += measured.argmax_us
        metrics[f"{kind.name}_over_argmax_{cell}"] = ratio.median
        metrics[f"{kind.name}_over_argmax_{cell}_p90"] = ratio.p90
        metrics[f"{kind.name}_us_{cell}"] = ours.median
        shape = "peaked" if kind.peaked else "flat"
        rows.append([kind.name, kind.says, shape, *figures(measured, ours, ratio, floor)])
    metrics[f"argmax_us_{cell}"] = Figures.of(argmax_us).median
    headers = ["kind", "asks for", "logits", "us", "p10", "p90", "argmax us", "ratio", "p10", "p90"]
    print_table([*headers, "over floor"], rows, title=f"{num_rows} rows x {vocab_size} tokens")
    return metrics


def figures(measured: Measurement, ours: Figures, ratio: Figures, floor: float) -> list[float]:
    base = Figures.of(measured.argmax_us)
    return [
        *(ours.median, ours.p10, ours.p90, base.median),
        *(ratio.median, ratio.p10, ratio.p90, ours.median / floor),
    ]
