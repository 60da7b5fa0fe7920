"""A picture of what batches are made of over time."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.errors import ConfigError
from runtime.recording.timeline import Timeline

NUM_BINS = 400


def plot_batches(timeline: Timeline, path: Path) -> None:
    """Tokens and sequences of steps, and how long they take: means of up to 400 stretches of time.

    Raises ConfigError: matplotlib isn't installed, or there is no step.
    """
    try:
        # Imported here: nothing else needs it. Without pyplot nothing looks for a screen.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "batch.png needs matplotlib, which isn't installed: install the extra `bench`, "
            "pip install 'lockstep-serving[bench]'"
        ) from error
    steps = [each for each in timeline.steps if each.ended_s is not None]
    if not steps:
        raise ConfigError("the recording has no step that came to its end: nothing can be drawn")
    starts = np.array([each.started_s for each in steps]) - timeline.start_s
    bins = _Bins(starts)
    figure = Figure(figsize=(12, 9), layout="constrained")
    tokens, sequences, times = figure.subplots(3, 1, sharex=True)
    decode = bins.mean([each.num_decode_tokens for each in steps])
    prefill = bins.mean([each.num_prefill_tokens for each in steps])
    tokens.stackplot(bins.middles, decode, prefill, labels=["decode", "prefill"], step="mid")
    tokens.set(title="tokens of a step", ylabel="tokens")
    running = bins.mean([each.num_sequences for each in steps])
    sequences.plot(bins.middles, running, label="in the step")
    waiting = bins.mean([each.num_waiting for each in steps])
    sequences.plot(bins.middles, waiting, label="waiting")
    sequences.set(title="sequences", ylabel="count")
    ends = np.array([each.ended_s or 0.0 for each in steps])
    times.plot(bins.middles[1:], bins.mean([0.0, *np.diff(ends) * 1000])[1:], label="step to step")
    forwards = [each.ranks[0][1] * 1000 if each.ranks else 0.0 for each in steps]
    times.plot(bins.middles, bins.mean(forwards), label="forward pass, rank 0")
    times.set(title="time", xlabel="s", ylabel="ms")
    for axis in (tokens, sequences, times):
        axis.set_ylim(bottom=0)
        axis.legend(loc="upper right")
    figure.savefig(path, dpi=120)


class _Bins:
    """Stretches of time that have steps."""

    def __init__(self, starts: NDArray[np.float64]) -> None:
        edges = np.linspace(starts[0], max(starts[-1], starts[0] + 1e-6), NUM_BINS + 1)
        places = np.clip(np.searchsorted(edges, starts, side="right") - 1, 0, NUM_BINS - 1)
        self._used, self._index = np.unique(places, return_inverse=True)
        self.middles = ((edges[:-1] + edges[1:]) / 2)[self._used]

    def mean(self, values: list[float] | list[int]) -> NDArray[np.float64]:
        """Of each bin's steps."""
        sums = np.bincount(self._index, weights=np.array(values, np.float64))
        return np.asarray(sums / np.bincount(self._index))
