"""`python -m benchmarks overhead`."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from benchmarks.overhead.cases import DEPTH, MAX_ROWS, Case, Deployment, deployments, goal
from benchmarks.overhead.stack import Measured, running_stack
from benchmarks.overhead.traffic import write_tokenizer
from benchmarks.report import json_option, machine_line, print_table, write_json

NOTES = """\
Workers whose model sleeps, the real engine and its gRPC streams to them, a frontend, and clients
that read a stream for each row: all in processes of their own. Frontend and clients run at the
lowest priority (nice 19), as they would on cores of their own: figures depend on whatever else
runs on the machine. idle: share of the window in which rank 0 ran no step. late: by how
much a step took longer than it should on rank 0, samples shared; no idling as counted here, though
at tp > 1 rank 0 may wait in it for another rank. lost: share of the window that is no step's own
time, idle and late together. driver: mean of a step, the engine's own timings, of which schedule
has flattening, encode has decoding, and publish has the scheduler's update. received: tokens that
clients got in the window, of those sampled: where it is far below 100, frontend and clients don't
keep up, and the figures are those of an engine whose frontend lags. added: round trip that the
proxy added, as measured meanwhile: what was asked for, and what the proxy itself takes."""
HEADERS = (
    *(
        "step ms",
        "rows",
        "depth",
        "idle %",
        "goal",
        "met",
        "lost %",
        "driver us",
        "schedule",
        "encode",
    ),
    *("publish", "interval ms", "p99", "late us", "bytes", "mean", "received %"),
    "added ms",
)


@click.command("overhead")
@click.option("--step-ms", type=click.FloatRange(0.1), multiple=True, default=(1.0, 5.0, 20.0))
@click.option("--rows", type=click.IntRange(1, MAX_ROWS), multiple=True, default=(8, 64, 256))
@click.option("--tp", type=click.IntRange(1, 8), multiple=True, default=(1, 2))
@click.option(
    "--delay-ms",
    type=click.FloatRange(0),
    multiple=True,
    default=(0.0, 0.3, 1.0),
    help="Round trip added between driver and workers.",
)
@click.option(
    "--depth",
    type=click.IntRange(1, 8),
    multiple=True,
    default=(DEPTH,),
    help="Most steps in flight; several are measured in turns.",
)
@click.option("--seconds", type=click.FloatRange(0.1), default=5.0, show_default=True)
@click.option("--quick", is_flag=True, help="One short measurement, to see that it runs.")
@json_option
def overhead(
    step_ms: Sequence[float],
    rows: Sequence[int],
    tp: Sequence[int],
    delay_ms: Sequence[float],
    depth: Sequence[int],
    seconds: float,
    quick: bool,
    json_path: Path | None,
) -> None:
    """Measure how long a device waits for its driver between steps.

    \b
    Options that may be given several times replace what is measured by default.
    Metrics (CELL: such as 5ms_64rows_0ms, with _tp2 and _depth1 behind):
      idle_pct_CELL            share of time in which rank 0 has no step to run
      lost_pct_CELL            share of time that is no step's own: idle, or late
      driver_us_CELL           the driver's own work for a step
      interval_ms_CELL         median between the starts of two steps; also interval_ms_p99_CELL
      sent_bytes_CELL          median of a step, to rank 0; also sent_bytes_mean_CELL
      received_pct_CELL        tokens that clients got, of those sampled
      added_ms_CELL            round trip that the proxy really added
    """  # noqa: D301 - click wants the backspace itself
    if quick:
        step_ms, rows, tp, delay_ms, depth, seconds = (5.0,), (8,), (1,), (0.3,), (DEPTH,), 1.0
    click.echo(f"{machine_line()}; windows of {seconds:g} s")
    click.echo(NOTES)
    cases = [Case(step_ms=each, rows=count) for each in step_ms for count in rows]
    metrics: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        for group in deployments(tp, delay_ms, depth):
            metrics |= measure_group(group, cases, seconds, Path(folder))
    if json_path is not None:
        write_json(json_path, metrics)


def measure_group(
    group: Sequence[Deployment], cases: Sequence[Case], seconds: float, model: Path
) -> dict[str, float]:
    """Runs deployments side by side, case by case in turns, and prints their table."""
    metrics: dict[str, float] = {}
    table = []
    with ExitStack() as running:
        stacks = [running.enter_context(running_stack(on, model)) for on in group]
        for case in cases:
            for stack in stacks:
                measured = stack.measure(case, seconds)
                table.append(table_row(case, stack.on, measured))
                metrics |= metrics_of(case.name(stack.on), measured)
    title = f"tp {group[0].tp}, {group[0].delay_ms:g} ms added"
    print_table(HEADERS, table, title=title)
    return metrics


def table_row(case: Case, on: Deployment, measured: Measured) -> tuple[object, ...]:
    most = goal(case, on)
    verdict = "" if most is None else "yes" if measured.idle_pct < most else "no"
    return (
        *(case.step_ms, case.rows, on.depth, measured.idle_pct, most, verdict, measured.lost_pct),
        *(measured.driver_us, measured.schedule_us, measured.encode_us, measured.publish_us),
        *(measured.interval_ms, measured.interval_ms_p99, measured.late_us),
        *(measured.sent_bytes, measured.sent_bytes_mean),
        *(measured.received_pct, measured.added_ms),
    )


def metrics_of(name: str, measured: Measured) -> dict[str, float]:
    return {
        f"idle_pct_{name}": measured.idle_pct,
        f"lost_pct_{name}": measured.lost_pct,
        f"driver_us_{name}": measured.driver_us,
        f"interval_ms_{name}": measured.interval_ms,
        f"interval_ms_p99_{name}": measured.interval_ms_p99,
        f"sent_bytes_{name}": measured.sent_bytes,
        f"sent_bytes_mean_{name}": measured.sent_bytes_mean,
        f"received_pct_{name}": measured.received_pct,
        **({} if measured.added_ms is None else {f"added_ms_{name}": measured.added_ms}),
    }
