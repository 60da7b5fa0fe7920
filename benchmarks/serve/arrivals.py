"""When requests come, and what they ask for: drawn, or of a trace."""

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

from benchmarks.simulate.workload import read_trace
from benchmarks.workloads.workload import Workload, WorkloadRequest, id_range
from runtime.config import require


class Arrival(NamedTuple):
    after_s: float  # the beginning
    request: WorkloadRequest


class Load(NamedTuple):
    requests_per_s: float  # as asked for; of a trace, its mean
    arrivals: list[Arrival]


def poisson(workload: Workload, *, requests_per_s: float, num_requests: int, seed: int) -> Load:
    """The workload's requests in their order, again with other token ids where it ends."""
    draw = random.Random(f"{seed}-{requests_per_s}")
    after_s = 0.0
    arrivals = []
    requests = _endless(workload)
    for _ in range(num_requests):
        after_s += draw.expovariate(requests_per_s)
        arrivals.append(Arrival(after_s, next(requests)))
    return Load(requests_per_s, arrivals)


def _endless(workload: Workload) -> Iterator[WorkloadRequest]:
    for distance in count():
        yield from workload.shifted(distance).requests


def of_trace(path: Path, *, vocab_size: int, seed: int) -> Load:
    """Lengths and times of the trace's lines, with token ids that are drawn.

    Prompts of one `prefix` begin with the same ids. Raises ConfigError: a line can't be read, or
    there are fewer than two times.
    """
    low, size = id_range(vocab_size)

    def ids(name: str, length: int) -> tuple[int, ...]:
        draw = random.Random(f"{seed}-{name}")
        return tuple(draw.randrange(low, low + size) for _ in range(length))

    arrivals = []
    for number, line in enumerate(read_trace(path)):
        prefix = ids(f"prefix {line.prefix}", line.num_prefix_tokens)
        rest = ids(f"request {number}", line.num_prompt_tokens - line.num_prefix_tokens)
        request = WorkloadRequest(prefix + rest, line.num_output_tokens)
        arrivals.append(Arrival(line.arrival_s, request))
    arrivals.sort(key=lambda each: each.after_s)
    first_s, last_s = (arrivals[0].after_s, arrivals[-1].after_s) if arrivals else (0.0, 0.0)
    require(last_s > first_s, f"trace={path} must have arrivals at two times at least")
    moved = [Arrival(each.after_s - first_s, each.request) for each in arrivals]
    return Load((len(moved) - 1) / (last_s - first_s), moved)
