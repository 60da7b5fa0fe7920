"""One deployment that serves one list of requests."""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.simulate.deployment import Deployment
from benchmarks.simulate.replicas import Replicas
from benchmarks.simulate.request_log import Slo
from benchmarks.simulate.summary import Summary, summarise
from benchmarks.simulate.timeline import Timeline
from benchmarks.simulate.workload import SimulatedRequest

# New objects before the collector looks at them.
YOUNG_OBJECTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of it."""

    summary: Summary
    timelines: list[Timeline]  # by replica
    failures: Counter[str]  # refused and dropped requests by kind of error


@contextmanager
def rare_collections() -> Iterator[None]:
    """Has the garbage collector look seldom: it took a fifth of the time and found nothing."""
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run(deployment: Deployment, requests: Sequence[SimulatedRequest], slo: Slo) -> Run:
    replicas = Replicas(deployment, requests)
    with rare_collections():
        replicas.run()
    return Run(
        summary=summarise(replicas.log, replicas.timelines, replicas.stats(), slo),
        timelines=replicas.timelines,
        failures=replicas.log.failures,
    )
