"""`python -m benchmarks soak`: long mixed traffic, and what is left of it."""

from collections import Counter
from pathlib import Path

import click

from benchmarks.report import json_option, machine_line, print_table, write_json
from benchmarks.soak.finding import LEAST_S_FOR_MEMORY, Finding
from benchmarks.soak.measure import OPTIONS, measure

NOTES = """\
A tiny random model with windows behind two frontends and a pool of blocks that is too small.
Clients ask by gRPC and by HTTP, for completions and chats, with every parameter; one in five
leaves. In the gaps between rounds every block must be free and no request known. The ranks compare
the hash of what each step reads and writes, and its delta with the whole step. Probes are the same
requests in every round, and must bring the same tokens."""

ENDS = ("answered", "left", "failed")


def show(finding: Finding) -> dict[str, float]:
    """Prints it; returns the metrics."""
    log, stats = finding.log, finding.stats
    rows = [
        (kind, *(log.ends[kind, end] for end in ENDS))
        for kind in sorted({kind for kind, _ in log.ends})
    ]
    print_table(("kind", *ENDS), rows, title="Requests")
    click.echo(
        f"\n{stats.num_steps} steps, {stats.num_output_tokens} tokens, "
        f"{stats.num_preemptions} preemptions, {stats.num_finished_abort} choices aborted; "
        f"{stats.num_blocks} blocks\n"
        f"{log.num_probed} probes; {finding.num_gaps} gaps, {len(finding.leaks)} of them not idle"
    )
    ends = Counter[str]()
    for (_, end), count in log.ends.items():
        ends[end] += count
    metrics = {end: float(ends[end]) for end in ENDS} | {
        "steps": float(stats.num_steps),
        "tokens": float(stats.num_output_tokens),
        "preemptions": float(stats.num_preemptions),
        "probes": float(log.num_probed),
        "faults": float(len(finding.faults())),
    }
    return metrics | _show_memory(finding)


def _show_memory(finding: Finding) -> dict[str, float]:
    growth = finding.growth()
    rows = [(name, each.before, each.after, each.megabytes) for name, each in growth.items()]
    headers = ("process", "second quarter", "last quarter", "growth")
    print_table(headers, rows, title="Resident memory, medians, MB")
    if finding.seconds < LEAST_S_FOR_MEMORY:
        click.echo(f"not judged in less than {LEAST_S_FOR_MEMORY / 60:g} minutes")
    return {f"growth_mb_{name.replace(' ', '_')}": each.megabytes for name, each in growth.items()}


@click.command("soak")
@click.option("--minutes", type=click.FloatRange(0.05), default=30.0, show_default=True)
@click.option("--tp", type=click.IntRange(1), default=2, show_default=True)
@click.option("--depth", type=click.IntRange(1, 8), default=2, show_default=True)
@json_option
def soak(minutes: float, tp: int, depth: int, json_path: Path | None) -> None:
    """Serve mixed traffic for long, and look for what grows, leaks or drifts.

    Exits with 1 where something does.

    \b
    Metrics:
      answered, left, failed           requests; those that left did so on purpose
      steps, tokens, preemptions       of the engine
      probes, faults
      growth_mb_PROCESS                of resident memory, from the second quarter to the last
    """  # noqa: D301 - click wants the backspace itself
    click.echo(f"{machine_line()}; TP {tp}, depth {depth}, {minutes:g} minutes")
    click.echo(NOTES)
    click.echo(f"lockstep serve {' '.join(OPTIONS)}")
    try:
        finding = measure(seconds=60 * minutes, tp=tp, depth=depth)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    metrics = show(finding)
    if json_path is not None:
        write_json(json_path, metrics)
    if faults := finding.faults():
        raise click.ClickException("\n".join(faults))
    click.echo("\nnothing grew, leaked or drifted")
