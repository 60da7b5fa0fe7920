"""`python -m benchmarks overload`: ten times what a server can do, and what becomes of it."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.overload.client import End, Outcome
from benchmarks.overload.measure import OPERATOR_OPTIONS, Finding, measure
from benchmarks.overload.server import Memory
from benchmarks.report import (
    Figures,
    json_option,
    machine_line,
    print_table,
    smoke_option,
    write_json,
)

NOTES = """\
The embedded model behind two frontends, as an operator would bound it; the load comes from one
process on one core, half by HTTP (a connection each), half by gRPC. Capacity: as many clients as
the server lets in, each asking again at once. Overload: requests at random times, none tried again.
Model, driver, frontends and load share this machine's cores: where there are two, latencies are of
a server that also lost part of a core to its clients."""

ENDS: tuple[End, ...] = ("answered", "rejected", "late", "failed")


def rejections(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [each for each in outcomes if each.end == "rejected"]


def latencies_ms(outcomes: Sequence[Outcome], figure: str) -> list[float]:
    """Of those that were answered: `ttft`, `tpot` or `total`."""
    answered = [each for each in outcomes if each.end == "answered"]
    values: dict[str, list[float | None]] = {
        "ttft": [each.ttft_s for each in answered],
        "tpot": [each.tpot_s for each in answered],
        "total": [each.total_s for each in answered],
    }
    return [1000 * value for value in values[figure] if value is not None]


def show(finding: Finding) -> dict[str, float]:
    """Prints it; returns the metrics."""
    click.echo(
        f"\ncapacity {finding.capacity:.1f} requests/s; offered {finding.offered:.1f} requests/s"
    )
    metrics = {"capacity_rps": finding.capacity, "offered_rps": finding.offered}
    metrics |= _show_ends(finding) | _show_latencies(finding) | _show_memory(finding)
    return metrics | _show_end(finding)


def _show_ends(finding: Finding) -> dict[str, float]:
    rows = []
    for name, outcomes in (("capacity", finding.at_capacity), ("overload", finding.overloaded)):
        for way in ("http", "grpc"):
            ends = Counter(each.end for each in outcomes if each.way == way)
            rows.append((name, way, *(ends[end] for end in ENDS)))
    print_table(("load", "by", *ENDS), rows, title="Requests")
    refused = rejections(finding.overloaded)
    without = sum(not each.has_hint for each in refused)
    click.echo(f"rejections without a hint when to try again: {without}")
    for detail, count in Counter(
        each.detail[:120] for each in finding.overloaded if each.end == "failed"
    ).most_common(5):
        click.echo(f"failed, {count} times: {detail}")
    counts = Counter(each.end for each in finding.overloaded)
    return {end: float(counts[end]) for end in ENDS} | {"rejected_without_hint": float(without)}


def _show_latencies(finding: Finding) -> dict[str, float]:
    rows: list[tuple[object, ...]] = []
    metrics: dict[str, float] = {}
    measured = {
        f"{figure}_{name}": latencies_ms(outcomes, figure)
        for figure in ("ttft", "tpot", "total")
        for name, outcomes in (("capacity", finding.at_capacity), ("overload", finding.overloaded))
    }
    for way in ("http", "grpc"):
        measured[f"rejection_{way}"] = [
            1000 * each.total_s for each in rejections(finding.overloaded) if each.way == way
        ]
    for name, values in measured.items():
        if not values:
            continue
        figures = Figures.of(values)
        rows.append((name.replace("_", ", "), figures.median, figures.p99, figures.max))
        metrics |= {f"{name}_ms": figures.median, f"{name}_ms_p99": figures.p99}
    print_table(("latency", "median", "p99", "max"), rows, title="Latencies, ms")
    return metrics


def _show_memory(finding: Finding) -> dict[str, float]:
    rows: list[tuple[object, ...]] = []
    metrics: dict[str, float] = {}
    for name, megabytes in finding.memory.megabytes.items():
        memory = Memory(megabytes)
        rows.append((name, memory.first, memory.largest, memory.growth))
        metrics[f"growth_mb_{name.replace(' ', '_')}"] = memory.growth
    headers = ("process", "before", "largest", "growth in the last quarter")
    print_table(headers, rows, title="Resident memory under overload, MB")
    return metrics


def _show_end(finding: Finding) -> dict[str, float]:
    if finding.idle_s is None:
        click.echo(f"\nnot idle after the load: {finding.state}")
    else:
        click.echo(f"\nidle {finding.idle_s:.2f} s after the last answer: {finding.state}")
    last = finding.last
    click.echo(f"a request then: {last.end}, {1000 * last.total_s:.0f} ms in all")
    return {
        "idle_s": float("inf") if finding.idle_s is None else finding.idle_s,
        "last_request_ms": 1000 * last.total_s,
    }


@click.command("overload")
@click.option("--seconds", type=click.FloatRange(1), default=60.0, show_default=True)
@click.option("--factor", type=click.FloatRange(1), default=10.0, show_default=True)
@json_option
@smoke_option
def overload(seconds: float, factor: float, json_path: Path | None, smoke: bool) -> None:
    """Ask a server for ten times what it can do.

    \b
    Metrics:
      capacity_rps, offered_rps
      answered, rejected, late, failed, rejected_without_hint    requests under overload
      FIGURE_LOAD_ms           median; also _p99. FIGURE: ttft, tpot, total;
                               LOAD: capacity, overload
      rejection_WAY_ms         median; also _p99. WAY: http, grpc
      growth_mb_PROCESS        of resident memory in the last quarter
      idle_s, last_request_ms  after the load
    """  # noqa: D301 - click wants the backspace itself
    capacity_s = max(10.0, seconds / 4)
    if smoke:
        seconds, capacity_s = 3.0, 3.0
    click.echo(f"{machine_line()}; {factor:g} times its capacity for {seconds:g} s")
    click.echo(NOTES)
    click.echo(f"lockstep serve {' '.join(OPERATOR_OPTIONS)}")
    finding = measure(factor=factor, seconds=seconds, capacity_s=capacity_s)
    metrics = show(finding)
    if json_path is not None:
        write_json(json_path, metrics)
