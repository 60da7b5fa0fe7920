"""A picture of one model inside a node, and across nodes."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.multinode.measure import PARTS, Measured


def plot(path: Path, title: str, found: Mapping[str, Measured]) -> None:
    """Throughput, the parts of a step, and recovery."""
    # Imported here: nothing else needs it. Without pyplot nothing looks for a screen.
    from matplotlib.figure import Figure

    names = [*found]
    figure = Figure(figsize=(11, 4), layout="constrained")
    throughput, steps, recovery = figure.subplots(1, 3)
    figure.suptitle(title)
    throughput.bar(names, [each.tokens_per_s for each in found.values()])
    throughput.set(title="throughput", ylabel="tokens/s")
    below = [0.0] * len(names)
    for part in PARTS[:-1]:
        heights = [each.step_ms[part] for each in found.values()]
        steps.bar(names, heights, bottom=below, label=part)
        below = [one + other for one, other in zip(below, heights, strict=True)]
    steps.set(title="a step, by part", ylabel="ms")
    steps.legend()
    recovery.bar(names, [each.recovery_s or 0.0 for each in found.values()])
    recovery.set(title="a rank is killed: longest pause", ylabel="s")
    figure.savefig(path, dpi=120)
