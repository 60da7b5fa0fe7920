"""What `simulate` prints."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import click
import numpy as np

from benchmarks.report import print_table
from benchmarks.simulate.cases import Case
from benchmarks.simulate.cost import CostConstants, CostModel
from benchmarks.simulate.deployment import Deployment, describe
from benchmarks.simulate.request_log import Slo
from benchmarks.simulate.run import Run
from benchmarks.simulate.search import Search
from benchmarks.simulate.summary import Summary

if TYPE_CHECKING:
    from benchmarks.simulate.measure import Measurement

SHOWN_CONTEXT = 1024
# Arrivals should last for so many requests' time, or the run is all beginning and end.
STEADY_REQUESTS = 5


def print_head(cases: Sequence[Case], load: str, slo: Slo) -> None:
    """What is about to run, and on which assumptions."""
    click.echo(describe(cases[0].deployment))
    click.echo(load)
    click.echo(f"SLOs: TTFT {1e3 * slo.ttft_s:g} ms, TPOT {1e3 * slo.tpot_s:g} ms")
    print_limits([case.deployment for case in cases])
    print_constants(cases[0].deployment.constants)
    print_costs(cases[0].deployment.cost)


def print_limits(deployments: Sequence[Deployment]) -> None:
    rows: list[list[object]] = []
    for each in deployments:
        layout = each.layout
        row: list[object] = [layout.num_blocks, layout.num_blocks * layout.block_bytes / 1e9]
        row += [layout.max_sequence_tokens, each.model.max_model_len]
        row += [each.config.max_num_batched_tokens, each.config.max_num_seqs, each.config.policy]
        if row not in rows:
            rows.append(row)
    headers = ["blocks", "GB on a GPU", "tokens they hold", "max_model_len"]
    headers += ["max_num_batched_tokens", "max_num_seqs", "policy"]
    print_table(headers, rows, title="Cache and limits of a replica")


def print_costs(cost: CostModel) -> None:
    """What the cost model makes of a few steps."""
    rows = []
    for label, seq_len, query_len, count in (
        ("1 decode", SHOWN_CONTEXT, 1, 1),
        ("64 decodes", SHOWN_CONTEXT, 1, 64),
        ("256 decodes", SHOWN_CONTEXT, 1, 256),
        (f"prefill of {SHOWN_CONTEXT}", 0, SHOWN_CONTEXT, 1),
    ):
        step = cost.step(
            np.full(count, seq_len, np.int32),
            np.full(count, query_len, np.int32),
            num_samples=count,
        )
        parts = (step.linear_s, step.attention_s, step.sampling_s, step.collective_s, step.host_s)
        rows.append([label, *(1e3 * each for each in (*parts, step.total_s))])
    headers = ["step", "linear", "attention", "sampling", "collectives", "host", "sum"]
    title = f"What a step costs at tp={cost.tp}, in ms, with {SHOWN_CONTEXT} tokens of context"
    print_table(headers, rows, title=title)


def print_constants(constants: CostConstants) -> None:
    rows = [
        (each.name, float(getattr(constants, each.name)), each.metadata["help"])
        for each in fields(constants)
    ]
    print_table(["constant", "value", "meaning"], rows, title="What the cost model assumes")


def print_sweep(cases: Mapping[str, Run]) -> None:
    latency, resources = [], []
    for label, each in cases.items():
        s = each.summary
        latency.append(
            [
                label,
                *(s.ttft_p50_ms, s.ttft_p90_ms, s.ttft_p99_ms),
                *(s.tpot_p50_ms, s.tpot_p90_ms, s.tpot_p99_ms),
                *(s.itl_p99_ms, s.output_tokens_per_s, s.requests_per_s, s.goodput_per_s),
                100 * s.good_share,
            ]
        )
        resources.append(
            [
                label,
                *(100 * s.occupancy_mean, 100 * s.occupancy_max, s.num_preemptions),
                *(100 * s.prefix_hit_rate, s.num_refused, s.mean_batch, s.max_running),
                *(s.max_waiting, 100 * s.busy_share, s.duration_s),
            ]
        )
    headers = ["", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99", "ITL p99"]
    headers += ["tokens/s", "requests/s", "goodput/s", "good %"]
    print_table(headers, latency, title="Latencies in ms")
    headers = ["", "blocks %", "max", "preemptions", "prefix hit %", "refused", "batch"]
    headers += ["max running", "max waiting", "busy %", "seconds"]
    print_table(headers, resources, title="What was in use, of one replica")


def print_search(label: str, search: Search, *, tp: int, good_share: float) -> None:
    rows = [
        [count, count * tp, 100 * s.good_share, s.ttft_p99_ms, s.tpot_p99_ms, 100 * s.busy_share]
        for count, s in sorted(search.tries.items())
    ]
    headers = ["replicas", "GPUs", "good %", "TTFT p99", "TPOT p99", "busy %"]
    print_table(headers, rows, title=f"{label}: how many replicas?")
    click.echo("\n" + answer(label, search, tp=tp, good_share=good_share))


def answer(label: str, search: Search, *, tp: int, good_share: float) -> str:
    wanted = f"the SLOs for {good_share:.0%} of the requests"
    if search.answer is None:
        most = max(search.tries)
        met = search.tries[most].good_share
        return f"{label}: {most} replicas don't meet {wanted}: {met:.1%} (see --max-replicas)"
    count = search.answer
    line = f"{label}: {count} replicas, {count * tp} GPUs, meet {wanted}"
    if count == 1:
        return line
    return f"{line}; {count - 1} meet them for {search.tries[count - 1].good_share:.1%}"


def warn(case: Case, each: Run) -> None:
    """What a reader should know before believing a figure."""
    for kind, count in sorted(each.failures.items()):
        click.echo(f"{case.label}: {count} requests ended with {kind}")
    latency_s = each.summary.latency_p50_ms / 1e3
    if case.span_s < STEADY_REQUESTS * latency_s:
        click.echo(
            f"{case.label}: arrivals last {case.span_s:.1f} s, a median request {latency_s:.1f} s, "
            "so most of this is filling up and draining: raise --requests"
        )


def print_measurement(measurement: "Measurement") -> None:
    print_constants(measurement.constants)
    low, high = min(measurement.drifts), max(measurement.drifts)
    click.echo(
        f"\nThe same calibration took {low:.2f} to {high:.2f} times as long after the workloads as "
        "before them: trust no comparison further than that."
    )
    for each in measurement.comparisons:
        rows = [
            [name, measured, each.simulated[name], each.simulated[name] / measured]
            for name, measured in each.measured.items()
        ]
        headers = ["", "measured", "simulated", "simulated / measured"]
        print_table(headers, rows, title=each.workload)


def finite_metrics(prefix: str, summary: Summary) -> dict[str, float]:
    """A figure without a value, such as the TPOT of answers of one token, is left out."""
    return {name: value for name, value in summary.metrics(prefix).items() if np.isfinite(value)}
