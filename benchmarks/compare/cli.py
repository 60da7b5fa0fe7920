"""`python -m benchmarks compare`: engines on the same workloads, in turn."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from tqdm import tqdm

from benchmarks.compare.options import (
    by_prefix_caching,
    make_setup,
    model_option,
    ours_option,
    peer_options,
    read_ours,
    workload_option,
)
from benchmarks.compare.pairs import measure_pairs
from benchmarks.compare.plot import plot
from benchmarks.compare.results import (
    NOTES,
    Compared,
    details_of,
    markdown,
    metrics_of,
    warnings,
)
from benchmarks.compare.smoke import smoke_workload
from benchmarks.compare.subject import Subject, sigterm_leaves_blocks
from benchmarks.compare.subjects import SUBJECTS, Places, Setup, specify
from benchmarks.floor.cli import show_rates
from benchmarks.floor.rates import measure_rates
from benchmarks.floor.work import work_of
from benchmarks.make_model import save_tiny_llama
from benchmarks.report import json_option, machine_line, smoke_option, write_json
from benchmarks.simulate.model_shape import read_model_config
from benchmarks.simulate.plot import require_matplotlib
from benchmarks.workloads.workload import Workload, load_workload

RUNS_OF_A_PAIR = 2


@click.command("compare")
@model_option
@workload_option
@click.option(
    "--reference",
    type=click.Choice([*SUBJECTS]),
    default="ours",
    show_default=True,
    help="Whose speed is divided by each peer's.",
)
@click.option("--peer", "peers", type=click.Choice([*SUBJECTS]), multiple=True)
@click.option("--pairs", "num_pairs", type=click.IntRange(1), default=5, show_default=True)
@ours_option
@peer_options
@click.option("--floor/--no-floor", "with_floor", default=True, show_default=True)
@click.option("--timeout-s", type=click.FloatRange(1), default=900.0, show_default=True)
@click.option("--markdown", "markdown_path", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw it to this PNG file (extra `bench`).",
)
@json_option
@smoke_option
def compare(
    model: Path | None,
    paths: tuple[Path, ...],
    reference: str,
    peers: tuple[str, ...],
    num_pairs: int,
    ours: tuple[str, ...],
    with_floor: bool,
    timeout_s: float,
    markdown_path: Path | None,
    plot_path: Path | None,
    json_path: Path | None,
    smoke: bool,
    places: Places,
) -> None:
    """Run engines on the same workloads, in turn, and compare them pair by pair.

    Of two engines one computes while the other waits; peers are stopped (SIGSTOP) meanwhile. Each
    run has token ids of its own, and fails where a request gets other than the tokens it asked
    for. benchmarks/peers/README.md says how peers are installed.

    \b
    Metrics (PEER, SUBJECT: names as above; NAME: the workload's):
      ratio_PEER_NAME                   median; also ratio_min, ratio_max; ttft_ratio,
                                        tpot_ratio where the workload is one request
      wall_s_, output_tokens_per_s_, memory_gb_, idle_share_SUBJECT_NAME
      start_s_SUBJECT                   the reference's end with _beside_PEER
    """  # noqa: D301 - click wants the backspace itself
    if plot_path is not None:
        require_matplotlib()
    with ExitStack() as stack:
        stack.enter_context(sigterm_leaves_blocks())
        if smoke:
            model = Path(stack.enter_context(TemporaryDirectory()))
            save_tiny_llama(model)
            workloads, num_pairs, with_floor = [smoke_workload()], 1, False
            peers = peers or ("transformers",)
        else:
            workloads = [load_workload(path) for path in paths]
        if model is None or not workloads or not peers:
            raise click.UsageError("give --model, --workload and --peer, or --smoke")
        if reference in peers:
            raise click.UsageError(f"--peer {reference} is the --reference")
        groups = by_prefix_caching(workloads)
        setups = [make_setup(model, group, read_ours(ours), places) for group in groups]
        for name in (reference, *peers):
            specify(name, setups[0])  # what is missing is told before anything is measured
        click.echo(f"{machine_line()}; {num_pairs} pairs\n\n{NOTES}\n")
        floors_s = _floors_s(model, workloads) if with_floor else {}
        found: list[Compared] = []
        for setup, group in zip(setups, groups, strict=True):
            for each in _compared(setup, group, reference, peers, num_pairs, timeout_s, floors_s):
                found.append(each)
                # Each time, so that a peer that fails costs nothing that was measured before it.
                _write(found, markdown_path, plot_path, json_path)
    click.echo(f"\n{markdown(found)}\n")
    for line in warnings(found):
        click.echo(f"warning: {line}")


def _floors_s(model: Path, workloads: Sequence[Workload]) -> dict[str, float]:
    """By workload's name."""
    shape = read_model_config(model / "config.json")
    rates = measure_rates()
    show_rates(rates)
    _, flops_per_s = rates.best
    return {
        each.name: work_of(each, shape).floor_s(
            flops_per_s=flops_per_s, bytes_per_s=rates.bytes_per_s
        )
        for each in workloads
    }


def _compared(
    setup: Setup,
    workloads: Sequence[Workload],
    reference: str,
    peers: Sequence[str],
    num_pairs: int,
    timeout_s: float,
    floors_s: Mapping[str, float],
) -> Iterator[Compared]:
    """The reference beside one peer after another, of which one is there at a time."""
    with Subject(specify(reference, setup), timeout_s=timeout_s) as first:
        first.start()
        for name in peers:
            # Made only now: two that start at once would take each other's time.
            with Subject(specify(name, setup), timeout_s=timeout_s) as peer:
                peer.start()
                for workload in workloads:
                    num_runs = RUNS_OF_A_PAIR * (num_pairs + 1)
                    with tqdm(total=num_runs, desc=f"{name}, {workload.name}") as bar:
                        pairs = measure_pairs(
                            first, peer, workload, num_pairs=num_pairs, on_run=bar.update
                        )
                    yield Compared(
                        reference=reference,
                        peer=name,
                        engines={reference: first.engine, name: peer.engine},
                        startups_s={reference: first.startup_s, name: peer.startup_s},
                        pairs=pairs,
                        floor_s=floors_s.get(workload.name),
                    )


def _write(
    found: Sequence[Compared],
    markdown_path: Path | None,
    plot_path: Path | None,
    json_path: Path | None,
) -> None:
    if markdown_path is not None:
        text = f"{machine_line()}\n\n{markdown(found)}\n\n{NOTES}\n"
        markdown_path.write_text(text, encoding="utf-8")
    if plot_path is not None:
        plot(plot_path, machine_line(), found)
    if json_path is not None:
        write_json(json_path, metrics_of(found), details_of(found))
