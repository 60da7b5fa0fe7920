"""`python -m benchmarks chaos`: faults under load, and what becomes of the requests."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.chaos.faults import BETWEEN_NODES, KINDS, MEANINGS, Kind
from benchmarks.chaos.findings import Finding, Result
from benchmarks.chaos.load import NUM_CLIENTS
from benchmarks.chaos.run import Case, run
from benchmarks.report import json_option, machine_line, markdown_row, write_json

HEADERS = (
    *("fault", "kind", "to whom", "at s", "detection s", "limit s", "ready s", "recovery s"),
    "in the engine's words",
)
CAUSE_CHARS = 120


@click.command("chaos")
@click.option("--faults", "num_faults", type=click.IntRange(1), default=10, show_default=True)
@click.option(
    "--minutes",
    type=click.FloatRange(0),
    default=0.0,
    help="Over which the faults are spread; each soon after the last where unset.",
)
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(KINDS),
    multiple=True,
    help="May be given again; all that go with the number of nodes where unset.",
)
@click.option("--launcher", type=click.Choice(["local", "ray"]), default="local", show_default=True)
@click.option(
    "--nodes",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="Hosts, which are network namespaces on this machine where there are two.",
)
@click.option("--seed", type=int, help="Of kinds, victims and moments; drawn and told where unset.")
@click.option(
    "--log",
    "log_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the server's log to this file.",
)
@json_option
def chaos(
    num_faults: int,
    minutes: float,
    kinds: Sequence[Kind],
    launcher: str,
    nodes: int,
    seed: int | None,
    log_path: Path | None,
    json_path: Path | None,
) -> None:
    """Let faults befall the workers of a server under load.

    Each request is asked over and over, and compared with what it was answered undisturbed. The
    exit code is 1 where anything was otherwise than promised.

    \b
    Metrics:
      requests_lost, outputs_differing    of `requests` under faults
      detection_s_max, recovery_s_max     from the fault; also _median, and detection_s_max_KIND
      complaints                          whatever else should have been otherwise
    """  # noqa: D301 - click wants the backspace itself
    kinds = _check_kinds(kinds, nodes)
    if nodes > 1 and launcher != "ray":
        raise click.UsageError(f"nodes={nodes} needs --launcher ray, not --launcher {launcher}")
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    case = Case(
        launcher=launcher,
        num_nodes=nodes,
        num_faults=num_faults,
        kinds=kinds,
        seed=seed,
        minutes=minutes,
    )
    click.echo(f"{machine_line()}; {NUM_CLIENTS} clients; seed {seed}\n")
    for kind in kinds:
        click.echo(f"- {kind}: {MEANINGS[kind]}")
    click.echo("\n" + markdown_row(HEADERS) + "\n" + markdown_row(["---"] * len(HEADERS)))
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((log_path or Path(os.devnull)).open("w", encoding="utf-8"))
        result = run(case, log=log, on_finding=lambda each: click.echo(row_of(each)))
    _show(result)
    if json_path is not None:
        details = {"seed": seed, "faults": [asdict(each) for each in result.findings]}
        write_json(json_path, result.metrics(), details)
    if complaints := list(result.complaints()):
        raise click.ClickException("\n".join(["not as promised:", *complaints]))


def _check_kinds(kinds: Sequence[Kind], nodes: int) -> Sequence[Kind]:
    """Raises UsageError: one doesn't go with the number of nodes."""
    left_out = BETWEEN_NODES if nodes == 1 else ()
    for kind in kinds:
        if kind in left_out:
            raise click.UsageError(f"kind {kind} needs --nodes 2: {MEANINGS[kind]}")
    return kinds or [kind for kind in KINDS if kind not in left_out]


def row_of(finding: Finding) -> str:
    cause = " ".join(finding.cause.split())[:CAUSE_CHARS]
    return markdown_row(
        (
            *(finding.number, finding.kind, finding.victim, finding.at_s, finding.detection_s),
            *(finding.limit_s, finding.ready_s, finding.recovery_s, cause or "went on"),
        )
    )


def _show(result: Result) -> None:
    tally, state = result.disturbed, result.state
    click.echo(
        f"\n{tally.num_requests} requests in {result.seconds:.0f} s: {len(tally.lost)} lost, "
        f"{len(tally.differing)} with other outputs than undisturbed; "
        f"{result.num_preemptions} preemptions"
    )
    if result.idle_s is not None:
        click.echo(f"nothing held {result.idle_s:.2f} s after the last answer: {state}")
    for name, value in result.metrics().items():
        click.echo(f"- {name}: {value:g}")
