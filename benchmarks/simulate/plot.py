"""Pictures of a sweep over request rates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulate.request_log import Float64
from benchmarks.simulate.run import Run
from benchmarks.simulate.summary import Summary
from benchmarks.simulate.timeline import Timeline
from runtime.errors import ConfigError

NUM_BINS = 200


def plot_sweep(
    path: Path,
    title: str,
    rates: Sequence[float],
    runs: Sequence[Run],
) -> None:
    """TTFT, TPOT, goodput, preemptions against rate; occupancy over time, a line for each rate.

    `rates` are requests/s.
    """
    # Imported here: nothing else needs it. Without pyplot nothing looks for a screen.
    from matplotlib.figure import Figure

    summaries = [each.summary for each in runs]
    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    figure.suptitle(title)
    _percentiles(axes[0, 0], rates, summaries, "ttft")
    _percentiles(axes[0, 1], rates, summaries, "tpot")
    goodput = axes[0, 2]
    goodput.plot(rates, rates, color="lightgray", label="offered")
    goodput.plot(rates, [each.requests_per_s for each in summaries], marker=".", label="finished")
    goodput.plot(rates, [each.goodput_per_s for each in summaries], marker="o", label="goodput")
    goodput.set(title="goodput", xlabel="requests/s offered", ylabel="requests/s")
    occupancy = axes[1, 0]
    for rate, each in zip(rates, runs, strict=True):
        times, values = mean_occupancy(each.timelines)
        occupancy.plot(times, 100 * values, label=f"{rate:.4g}/s")
    occupancy.set(title="blocks held, mean of the replicas", xlabel="time, s", ylabel="%")
    preemptions = axes[1, 1]
    preemptions.plot(rates, [each.num_preemptions for each in summaries], marker="o")
    preemptions.set(title="preemptions", xlabel="requests/s offered", ylabel="count")
    batch = axes[1, 2]
    batch.plot(rates, [each.mean_batch for each in summaries], marker="o", label="mean in a step")
    batch.plot(rates, [each.max_running for each in summaries], marker=".", label="most running")
    batch.plot(rates, [each.max_waiting for each in summaries], marker=".", label="most waiting")
    batch.set(title="sequences of one replica", xlabel="requests/s offered", ylabel="count")
    for axis in (goodput, occupancy, preemptions, batch):
        axis.set_ylim(bottom=0)
    for axis in (goodput, occupancy, batch):
        axis.legend()
    figure.savefig(path, dpi=120)


def mean_occupancy(timelines: Sequence[Timeline]) -> tuple[Float64, Float64]:
    """Times in s, and the mean occupancy of all replicas at each; 0 where a replica idles."""
    end_s = max(each.end_s for each in timelines)
    edges = np.linspace(0, end_s, NUM_BINS + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    total = np.zeros(NUM_BINS)
    for each in timelines:
        start_s, seconds = np.array(each.start_s), np.array(each.seconds)
        if not start_s.size:
            continue
        step = np.maximum(0, np.searchsorted(start_s, middles, side="right") - 1)
        busy = (start_s[step] <= middles) & (middles < start_s[step] + seconds[step])
        total += np.where(busy, np.array(each.occupancy)[step], 0)
    return middles, total / len(timelines)


def _percentiles(
    axis: Any, rates: Sequence[float], summaries: Sequence[Summary], name: str
) -> None:
    for percentile in ("p50", "p90", "p99"):
        metric = f"{name}_{percentile}_ms"
        values = [each.metrics("")[metric] for each in summaries]
        axis.plot(rates, values, marker="o", label=percentile)
    axis.set(title=name.upper(), xlabel="requests/s offered", ylabel="ms", yscale="log")
    axis.legend()


def require_matplotlib() -> None:
    """Raises ConfigError: it isn't installed. Before a long run, rather than after it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib, which isn't installed: install the extra `bench`, "
            "pip install 'lockstep-serving[bench]'"
        ) from error
