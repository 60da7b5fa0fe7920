"""`python -m benchmarks simulate`: how many GPUs are needed, and with which limits."""

from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
from click.core import ParameterSource

from benchmarks.report import json_option, machine_line, smoke_option, write_json
from benchmarks.simulate import tables
from benchmarks.simulate.cases import LIMITS, Case, Values, describe_load, make_cases
from benchmarks.simulate.cost import CostConstants
from benchmarks.simulate.deployment import USABLE_SHARE, describe
from benchmarks.simulate.hardware import GPUS
from benchmarks.simulate.model_shape import PRESETS
from benchmarks.simulate.plot import plot_sweep, require_matplotlib
from benchmarks.simulate.request_log import Slo
from benchmarks.simulate.router import RouterName
from benchmarks.simulate.run import Run, run
from benchmarks.simulate.search import find_replicas
from benchmarks.simulate.summary import Summary
from benchmarks.simulate.workload import Workload
from runtime.commands.common import ByteSize, make_option
from runtime.config import EngineConfig
from runtime.errors import LockstepError

DRAWN = {field.name for field in fields(Workload)} - {"rate", "num_requests"}
CONSTANTS = {field.name for field in fields(CostConstants)}
Command = Callable[..., Any]
file_path = click.Path(path_type=Path, dir_okay=False)


def options_for(dataclass: type, names: Collection[str]) -> Callable[[Command], Command]:
    """An option for each of these fields."""
    hints = get_type_hints(dataclass)

    def decorate(command: Command) -> Command:
        for field in reversed(fields(dataclass)):
            if field.name in names:
                command = make_option(field, hints[field.name])(command)
        return command

    return decorate


@click.command()
@click.option(
    "--model",
    type=click.Choice(sorted(PRESETS)),
    default="llama-3.1-8b",
    show_default=True,
    help="A model whose sizes are known.",
)
@click.option("--model-config", type=file_path, help="A config.json, instead of --model.")
@click.option(
    "--gpu", type=click.Choice(sorted(GPUS)), default="H200", show_default=True, help="Hardware."
)
@click.option(
    "--replicas", type=int, default=1, show_default=True, help="Engines, of --tp GPUs each."
)
@click.option(
    "--router",
    type=click.Choice(get_args(RouterName)),
    default="least_loaded",
    show_default=True,
    help="Who gets a request: each in turn, the one with the fewest, or the one with its prefix.",
)
@click.option("--find-replicas", is_flag=True, help="Find the fewest that keep the SLOs.")
@click.option(
    "--good-share",
    type=float,
    default=0.99,
    show_default=True,
    help="Share of the requests for which --find-replicas wants the SLOs kept.",
)
@click.option("--max-replicas", type=int, default=256, show_default=True, help="Most to try.")
@click.option(
    "--ttft-slo-ms", type=float, default=1000.0, show_default=True, help="Latest first token."
)
@click.option(
    "--tpot-slo-ms", type=float, default=50.0, show_default=True, help="Slowest mean token."
)
@click.option(
    "--rate",
    "rates",
    type=float,
    multiple=True,
    help="Requests a second; may be repeated.  [default: 8]",
)
@click.option(
    "--requests",
    "num_requests",
    type=int,
    default=2000,
    show_default=True,
    help="How many to draw.",
)
@options_for(Workload, DRAWN)
@click.option("--trace", type=file_path, help="JSON lines of requests, instead of drawing them.")
@click.option("--save-trace", type=file_path, help="Write the drawn requests as a trace.")
@options_for(EngineConfig, set(LIMITS) - {"kv_memory"})
@click.option(
    "--kv-memory",
    type=ByteSize(),
    help=f"Bytes of KV cache on each GPU; what the weights leave of {USABLE_SHARE:.0%} of its "
    "memory where unset.",
)
@click.option("--vary", help="A limit and the values to try: max_num_seqs=64,128,256.")
@options_for(CostConstants, CONSTANTS)
@click.option("--plot", type=file_path, help="Draw the sweep to this PNG file (extra `bench`).")
@click.option(
    "--measure",
    is_flag=True,
    help="Instead, compare with the embedded model on this machine: about a minute.",
)
@json_option
@smoke_option
@click.pass_context
def simulate(ctx: click.Context, /, measure: bool, json_path: Path | None, **values: Any) -> None:
    """Run the real scheduler and engine against simulated GPUs, in virtual time.

    Answers "how many GPUs do I need, with which limits?". What a step costs comes from a stated
    model, printed with the result; `--measure` says how far it is from a run on this machine.

    Metrics in the JSON file are those of the tables, behind `rate_8_` or `trace_`, and behind the
    varied limit if there is one: `max_num_seqs_64_rate_8_ttft_p99_ms`; for --find-replicas also
    `rate_8_replicas` and `rate_8_gpus`. Those of --measure: `steady_measured_ttft_p50_ms`,
    `steady_simulated_ttft_p50_ms` and so on; `steady` and `burst` are its workloads.
    """
    if measure:
        refuse_others(ctx, "measure", set(ctx.params) - {"measure", "json_path"})
    if values["trace"]:
        refuse_others(ctx, "trace", {*DRAWN, "rates", "num_requests", "save_trace"})
    if values["plot"]:
        refuse_others(ctx, "plot", {"vary"})
    try:
        metrics = measured() if measure else simulated(ctx, values)
    except LockstepError as error:
        raise click.ClickException(str(error)) from error
    if json_path is not None:
        write_json(json_path, metrics)


def refuse_others(ctx: click.Context, name: str, others: Collection[str]) -> None:
    """Raises UsageError: one of `others` was given, which counts for nothing beside --`name`."""
    for other in ctx.command.params:
        is_given = ctx.get_parameter_source(other.name or "") is ParameterSource.COMMANDLINE
        if other.name in others and is_given:
            raise click.UsageError(f"{other.opts[0]} doesn't go with --{name}")


def measured() -> dict[str, float]:
    from benchmarks.simulate.measure import measure

    click.echo(machine_line())
    measurement = measure(click.echo)
    tables.print_measurement(measurement)
    return {
        f"{each.workload}_{side}_{name}": value
        for each in measurement.comparisons
        for side, figures in (("measured", each.measured), ("simulated", each.simulated))
        for name, value in figures.items()
    }


def simulated(ctx: click.Context, values: Values) -> dict[str, float]:
    if values["plot"]:
        require_matplotlib()
    slo = Slo(ttft_s=values["ttft_slo_ms"] / 1e3, tpot_s=values["tpot_slo_ms"] / 1e3)
    cases = list(make_cases(ctx, values))
    tables.print_head(cases, describe_load(values), slo)
    runs: list[tuple[Case, Run]] = []
    metrics: dict[str, float] = {}
    for case in cases:
        if values["find_replicas"]:
            found = search_replicas(case, values, slo)
            if found is None:
                continue
            case = replace(case, deployment=replace(case.deployment, num_replicas=found))
            metrics[f"{case.metric_prefix}replicas"] = found
            metrics[f"{case.metric_prefix}gpus"] = found * case.deployment.config.tp
        runs.append((case, run(case.deployment, case.requests, slo)))
        metrics |= tables.finite_metrics(case.metric_prefix, runs[-1][1].summary)
    if runs:
        tables.print_sweep({case.label: each for case, each in runs})
    for case, each in runs:
        tables.warn(case, each)
    if values["plot"] and runs:
        plot_sweep(
            values["plot"],
            describe(cases[0].deployment),
            [case.offered_rate for case, _ in runs],
            [each for _, each in runs],
        )
    return metrics


def search_replicas(case: Case, values: Values, slo: Slo) -> int | None:
    def serve(count: int) -> Summary:
        deployment = replace(case.deployment, num_replicas=count)
        return run(deployment, case.requests, slo).summary

    good_share = values["good_share"]
    search = find_replicas(serve, good_share=good_share, max_replicas=values["max_replicas"])
    tp = case.deployment.config.tp
    tables.print_search(case.label, search, tp=tp, good_share=good_share)
    return search.answer
