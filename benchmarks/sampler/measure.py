"""Times sampling and one argmax over the same logits, in turns."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from benchmarks.sampler.cases import Kind, make_columns, make_inputs
from workers.batch import NO_MASKS
from workers.sampling.sampler import Sampler

LEAST_US = 2000.0  # of one timing: shorter calls are repeated within it


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Microseconds of a call, one of each for every round."""

    sample_us: list[float]
    argmax_us: list[float]

    @property
    def ratios(self) -> list[float]:
        """Round by round: what disturbs the machine disturbs both."""
        pairs = zip(self.sample_us, self.argmax_us, strict=True)
        return [ours / base for ours, base in pairs]


def measure(kind: Kind, logits: torch.Tensor, *, num_rounds: int, warm_up: int = 2) -> Measurement:
    """Positions differ from call to call, and so what is drawn."""
    num_rows, vocab_size = logits.shape
    columns = make_columns(kind, num_rows)
    inputs = make_inputs(columns, vocab_size)
    sampler = Sampler([1])
    positions = torch.arange(num_rows)

    def sample() -> None:
        positions.add_(1)
        sampler.sample(logits, positions, columns, inputs, NO_MASKS)

    def argmax() -> None:
        logits.argmax(dim=-1)

    # Calls are repeated by what one takes when warm.
    times = [(time_us(argmax), time_us(sample)) for _ in range(warm_up + 1)]
    argmax_calls, sample_calls = (
        1 + int(LEAST_US / min(each)) for each in zip(*times, strict=True)
    )
    argmax_us, sample_us = [], []
    for _ in range(num_rounds):
        argmax_us.append(time_us(argmax, argmax_calls))
        sample_us.append(time_us(sample, sample_calls))
    return Measurement(sample_us=sample_us, argmax_us=argmax_us)


def time_us(call: Callable[[], object], num_calls: int = 1) -> float:
    """Of one call, on average."""
    start = perf_counter_ns()
    for _ in range(num_calls):
        call()
    return (perf_counter_ns() - start) / 1e3 / num_calls


def read_gb_per_s(num_bytes: int, num_rounds: int = 7) -> float:
    """Of reading memory once, 10^9 bytes a second: the best of some rounds."""
    values = torch.ones(num_bytes // 4)
    best = min(time_us(lambda: values.max()) for _ in range(num_rounds + 1))
    return values.numel() * 4 / best / 1e3
