"""When each request's tokens came. Written by the sink of a connection, simulated or live."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulate.workload import SimulatedRequest
from runtime.request import RequestFailure, RequestOutput

Float64 = NDArray[np.float64]


class RequestLog:
    """Times of N requests, whose number is their `request_id`. One thread writes it."""

    def __init__(self, requests: Sequence[SimulatedRequest]) -> None:
        count = len(requests)
        self.arrival_s: Float64 = np.array([each.arrival_s for each in requests])
        self.num_output_tokens = np.array([each.num_output_tokens for each in requests])
        self.first_s: Float64 = np.full(count, np.nan)  # NaN until there is a token
        self.last_s: Float64 = np.full(count, np.nan)
        self.finished = np.zeros(count, np.bool_)
        self.failures: Counter[str] = Counter()  # by kind of error
        self.num_ended = 0
        self._gaps: list[Float64] = []

    def record(self, now_s: float, outputs: Iterable[RequestOutput | RequestFailure]) -> int:
        """Takes what a step brought; returns how many requests it ended."""
        ids, ended = [], []
        num_failures = 0
        for output in outputs:
            if isinstance(output, RequestFailure):
                self.failures[type(output.error).__name__] += 1
                num_failures += 1
                continue
            ids.append(output.request_id)
            if output.finish_reason is not None:
                ended.append(output.request_id)
        rows = np.array(ids, np.intp)
        gaps = now_s - self.last_s[rows]
        self.last_s[rows] = now_s
        is_first = np.isnan(gaps)
        if is_first.any():
            self.first_s[rows[is_first]] = now_s
            gaps = gaps[~is_first]
        self._gaps.append(gaps)
        if ended:
            self.finished[ended] = True
        self.num_ended += len(ended) + num_failures
        return len(ended) + num_failures

    @property
    def itl_s(self) -> Float64:
        """Time between two outputs of a request, for all of them, in no order."""
        return np.concatenate([np.empty(0), *self._gaps])

    @property
    def ttft_s(self) -> Float64:
        """Of each request; NaN where no token came."""
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> Float64:
        """Of each request: mean time of a token after the first; NaN where it has no second."""
        later = np.where(self.num_output_tokens > 1, self.num_output_tokens - 1, np.nan)
        tpot: Float64 = np.where(self.finished, self.last_s - self.first_s, np.nan) / later
        return tpot


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must get to count as good."""

    ttft_s: float
    tpot_s: float

    def met(self, log: RequestLog) -> NDArray[np.bool_]:
        """By request. A request of one token has no TPOT to miss."""
        slow = log.tpot_s > self.tpot_s  # NaN is never slow
        met: NDArray[np.bool_] = log.finished & (log.ttft_s <= self.ttft_s) & ~slow
        return met
