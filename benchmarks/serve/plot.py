"""A picture of a sweep over rates."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.serve.summary import PERCENTS, Summary


def plot(path: Path, title: str, summaries: Sequence[Summary]) -> None:
    """TTFT and TPOT against throughput, and goodput against what was offered."""
    # Imported here: nothing else needs it. Without pyplot nothing looks for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(title)
    ttft, tpot, goodput = figure.subplots(1, 3)
    for axis, name in ((ttft, "ttft"), (tpot, "tpot")):
        there = [each for each in summaries if (name, PERCENTS[0]) in each.latencies_ms]
        for percent in PERCENTS:
            axis.plot(
                [each.output_tokens_per_s for each in there],
                [each.latencies_ms[name, percent] for each in there],
                marker="o",
                label=f"p{percent}",
            )
        axis.set(title=name.upper(), xlabel="output tokens/s", ylabel="ms")
        axis.set_ylim(bottom=0)
        axis.legend()
    offered = [each.offered_per_s for each in summaries]
    goodput.plot(offered, offered, color="lightgray", label="offered")
    goodput.plot(offered, [each.finished_per_s for each in summaries], marker=".", label="finished")
    goodput.plot(offered, [each.goodput_per_s for each in summaries], marker="o", label="goodput")
    goodput.set(title="goodput", xlabel="requests/s offered", ylabel="requests/s")
    goodput.set_ylim(bottom=0)
    goodput.legend()
    figure.savefig(path, dpi=120)
