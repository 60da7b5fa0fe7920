"""A picture of a comparison."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compare.results import Compared, sides


def plot(path: Path, title: str, found: Sequence[Compared]) -> None:
    """Output tokens/s of each engine, and how many times as fast the reference was; with spread."""
    # Imported here: nothing else needs it. Without pyplot nothing looks for a screen.
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(each.pairs.workload.name for each in found))
    figure = Figure(figsize=(1.5 + 4.5 * len(workloads), 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, len(workloads), squeeze=False)
    for column, name in enumerate(workloads):
        here = [each for each in found if each.pairs.workload.name == name]
        rates: dict[str, list[float]] = {}
        for each in here:
            output = each.pairs.workload.num_output_tokens
            for subject, side in sides(each):
                # The reference ran beside each peer: all its runs together.
                rates.setdefault(subject, []).extend(output / wall_s for wall_s in side.walls_s)
        throughput, ratios = axes[0, column], axes[1, column]
        bars(throughput, rates)
        throughput.set(title=name, ylabel="output tokens/s")
        bars(ratios, {each.peer: each.pairs.ratios for each in here})
        ratios.axhline(1.0, color="gray", linewidth=1)
        ratios.set(ylabel=f"speed of {here[0].reference} over the peer's")
        for axis in (throughput, ratios):
            axis.tick_params(axis="x", rotation=30)
    figure.savefig(path, dpi=120)


def bars(axis: Any, values: Mapping[str, Sequence[float]]) -> None:
    """A bar to the median of each, with a line from its least to its most."""
    heights = [median(each) for each in values.values()]
    below = [height - min(each) for height, each in zip(heights, values.values(), strict=True)]
    above = [max(each) - height for height, each in zip(heights, values.values(), strict=True)]
    axis.bar([*values], heights, yerr=[below, above], capsize=4)
