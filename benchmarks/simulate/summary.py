"""The figures of one run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.simulate.request_log import Float64, RequestLog, Slo
from benchmarks.simulate.timeline import Timeline
from runtime.request import EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Field names are the names of metrics."""

    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    tpot_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    latency_p50_ms: float  # arrival to last token
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float  # requests that met the SLOs
    good_share: float  # of all requests, the refused ones too
    occupancy_mean: float  # share of the blocks that sequences hold, over time and replicas
    occupancy_max: float
    max_running: int  # sequences of one replica
    max_waiting: int
    num_preemptions: int
    prefix_hit_rate: float  # share of the prompt tokens
    num_refused: int  # or dropped from the queue
    num_steps: int
    mean_batch: float  # sequences in a step
    busy_share: float  # of the replicas' time
    duration_s: float  # first arrival to last token

    def metrics(self, prefix: str) -> dict[str, float]:
        return {f"{prefix}{name}": value for name, value in asdict(self).items()}


def summarise(
    log: RequestLog, timelines: Sequence[Timeline], stats: Sequence[EngineStats], slo: Slo
) -> Summary:
    duration_s = _duration_s(log)
    good = slo.met(log)
    ttft, tpot = percentiles_ms(log.ttft_s), percentiles_ms(log.tpot_s)
    itl = percentiles_ms(log.itl_s)
    num_steps = sum(each.num_steps for each in stats)
    num_sequences = sum(each.num_scheduled_sequences for each in stats)
    busy_s = sum(each.busy_s for each in timelines)
    prompt_tokens = sum(each.num_prompt_tokens for each in stats)
    return Summary(
        ttft_p50_ms=ttft[0],
        ttft_p90_ms=ttft[1],
        ttft_p99_ms=ttft[2],
        tpot_p50_ms=tpot[0],
        tpot_p90_ms=tpot[1],
        tpot_p99_ms=tpot[2],
        itl_p50_ms=itl[0],
        itl_p99_ms=itl[2],
        latency_p50_ms=percentiles_ms(log.last_s - log.arrival_s)[0],
        output_tokens_per_s=float(log.num_output_tokens[log.finished].sum()) / duration_s,
        requests_per_s=float(log.finished.sum()) / duration_s,
        goodput_per_s=float(good.sum()) / duration_s,
        good_share=float(good.mean()),
        occupancy_mean=sum(each.occupied_s for each in timelines) / (len(timelines) * duration_s),
        occupancy_max=max(each.max_occupancy for each in timelines),
        max_running=max(each.max_running for each in timelines),
        max_waiting=max(each.max_waiting for each in timelines),
        num_preemptions=sum(each.num_preemptions for each in stats),
        prefix_hit_rate=sum(each.num_cached_tokens for each in stats) / max(1, prompt_tokens),
        num_refused=log.failures.total(),
        num_steps=num_steps,
        mean_batch=num_sequences / max(1, num_steps),
        busy_share=busy_s / (len(timelines) * duration_s),
        duration_s=duration_s,
    )


def percentiles_ms(values_s: Float64) -> tuple[float, float, float]:
    """p50, p90 and p99 of those that aren't NaN; NaN where there are none."""
    known = values_s[~np.isnan(values_s)]
    if not known.size:
        return (float("nan"),) * 3
    p50, p90, p99 = 1e3 * np.percentile(known, (50, 90, 99))
    return float(p50), float(p90), float(p99)


def _duration_s(log: RequestLog) -> float:
    if not log.finished.any():
        return float("inf")
    return float(np.nanmax(log.last_s) - log.arrival_s[0])
