"""The times of a case, and the pauses of the garbage collector in them."""

import gc
import resource
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from runtime.collector import calm_collector


@dataclass(slots=True)
class Measurement:
    """One run of a case."""

    phases: dict[str, list[float]]  # us, by phase, one per step or round
    gc_pauses: list[float] = field(default_factory=list)  # us, those in the timed part
    full_gc_us: float = 0.0  # a full collection, asked for after the timed part
    disturbed: list[bool] = field(default_factory=list)  # by step: another process had the core

    def total(self, *names: str) -> list[float]:
        """Time per step of these phases together, in us; of all where none is named."""
        columns = [self.phases[name] for name in names or self.phases]
        return [sum(row) for row in zip(*columns, strict=True)]

    def undisturbed(self, *names: str) -> list[float]:
        """As `total`, of the steps that had the core for themselves."""
        steps = zip(self.total(*names), self.disturbed, strict=True)
        return [us for us, disturbed in steps if not disturbed]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Measurement":
        return cls(**values)


class Stopwatch:
    """Collects the times between marks, in us, and which steps were disturbed."""

    def __init__(self) -> None:
        self.phases: defaultdict[str, list[float]] = defaultdict(list)
        self.disturbed: list[bool] = []
        self._last = 0
        self._num_switches = num_involuntary_switches()

    def start_step(self) -> None:
        self._num_switches = num_involuntary_switches()
        self.start()

    def end_step(self) -> None:
        self.disturbed.append(num_involuntary_switches() > self._num_switches)

    def start(self) -> None:
        self._last = perf_counter_ns()

    def mark(self, phase: str) -> None:
        """Ends `phase`; the next one begins."""
        now = perf_counter_ns()
        self.phases[phase].append((now - self._last) / 1e3)
        self._last = perf_counter_ns()


def num_involuntary_switches() -> int:
    """How often the system took the core from this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@contextmanager
def collector_watched() -> Iterator[list[float]]:
    """Yields the list that the collector's pauses in the block are put into, in us."""
    pauses: list[float] = []
    started = 0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        if phase == "start":
            started = perf_counter_ns()
        else:
            pauses.append((perf_counter_ns() - started) / 1e3)

    gc.callbacks.append(watch)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(watch)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """The collector in the block is as in `lockstep serve` once it has started."""
    thresholds = gc.get_threshold()
    calm_collector()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def full_collection_us() -> float:
    started = perf_counter_ns()
    gc.collect()
    return (perf_counter_ns() - started) / 1e3
