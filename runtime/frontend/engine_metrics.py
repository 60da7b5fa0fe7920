"""What engines tell of themselves, as Prometheus takes it.

Every frontend of an engine tells the same of it, so these aren't summed over frontends: `engine` is
the address at which this one reaches it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from runtime.histogram import HistogramSnapshot
from runtime.request import EngineStats

Number = Callable[[EngineStats], float]
Values = Callable[[EngineStats], HistogramSnapshot]

GAUGES: tuple[tuple[str, str, Number], ...] = (
    ("num_requests_running", "Sequences that hold blocks.", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences that wait for admission.", lambda s: s.num_waiting),
    ("max_num_seqs", "Most sequences that run at once.", lambda s: s.max_num_seqs),
    (
        "kv_cache_usage_ratio",
        "Part of the blocks that sequences hold, from 0 to 1.",
        lambda s: 1 - s.num_free_blocks / max(s.num_blocks, 1),
    ),
    ("kv_cache_blocks", "Blocks of the pool.", lambda s: s.num_blocks),
    (
        "kv_cache_reusable_blocks",
        "Free blocks that hold a prefix for later requests.",
        lambda s: s.num_cached_blocks,
    ),
)

COUNTERS: tuple[tuple[str, str, Number], ...] = (
    ("steps", "Steps executed.", lambda s: s.num_steps),
    ("scheduled_tokens", "Tokens fed, in all steps.", lambda s: s.num_scheduled_tokens),
    (
        "scheduled_sequences",
        "Sequences that took part, in all steps; over steps it is the mean batch.",
        lambda s: s.num_scheduled_sequences,
    ),
    ("prompt_tokens", "Tokens of admitted prompts.", lambda s: s.num_prompt_tokens),
    ("generation_tokens", "Tokens sampled and delivered.", lambda s: s.num_output_tokens),
    (
        "prefix_cache_queries",
        "Tokens of prompts that were looked for in the prefix cache.",
        lambda s: s.num_prompt_tokens,
    ),
    (
        "prefix_cache_hits",
        "Tokens of prompts that were found in the prefix cache.",
        lambda s: s.num_cached_tokens,
    ),
    (
        "num_preemptions",
        "Sequences whose blocks were taken away and that were computed again.",
        lambda s: s.num_preemptions,
    ),
    (
        "nan_rows",
        "Requests that failed since the model's logits were no finite numbers.",
        lambda s: s.num_invalid_logits,
    ),
    (
        "empty_supports",
        "Requests that failed since their parameters left no token to sample.",
        lambda s: s.num_empty_supports,
    ),
    (
        "worker_restarts",
        "Times that the worker group was started again.",
        lambda s: max(s.epoch - 1, 0),
    ),
)

HISTOGRAMS: tuple[tuple[str, str, Values], ...] = (
    (
        "time_to_first_token_seconds",
        "From a request's arrival at the engine to its first token.",
        lambda s: s.ttft_s,
    ),
    (
        "inter_token_latency_seconds",
        "Between two tokens of a choice.",
        lambda s: s.itl_s,
    ),
    (
        "e2e_request_latency_seconds",
        "From a request's arrival at the engine to the end of its last choice.",
        lambda s: s.e2e_s,
    ),
    (
        "request_queue_time_seconds",
        "From a request's arrival at the engine to its admission.",
        lambda s: s.queue_s,
    ),
    ("request_prompt_tokens", "Tokens of an admitted prompt.", lambda s: s.prompt_tokens),
    ("request_generation_tokens", "Tokens of a choice that ended.", lambda s: s.output_tokens),
)

# Name, what it tells, its label, and that label's values.
LABELLED_COUNTERS: tuple[tuple[str, str, str, tuple[tuple[str, Number], ...]], ...] = (
    (
        "request_success",
        "Choices that ended, by why.",
        "finished_reason",
        (
            ("stop", lambda s: s.num_finished_stop),
            ("length", lambda s: s.num_finished_length),
            ("abort", lambda s: s.num_finished_abort),
        ),
    ),
    (
        "engine_rejections",
        "Requests that the engine refused since its queue was full, or that waited too long in it.",
        "reason",
        (
            ("queue_full", lambda s: s.num_refused),
            ("timed_out", lambda s: s.num_timed_out),
        ),
    ),
)

STEP_PARTS: tuple[tuple[str, Values], ...] = (
    ("schedule", lambda s: s.step_s.schedule),
    ("encode", lambda s: s.step_s.encode),
    ("wire", lambda s: s.step_s.wire),
    ("forward", lambda s: s.step_s.forward),
    ("sample", lambda s: s.step_s.sample),
    ("publish", lambda s: s.step_s.publish),
    ("total", lambda s: s.step_s.total),
)


class EngineCollector(Collector):
    """Engines' metrics from their statistics, by the engine's address."""

    def __init__(self, stats: Mapping[str, EngineStats], addresses: Iterable[str] = ()) -> None:
        """`addresses` are those of all engines, and `stats` of those that answer."""
        self._stats = stats
        self._addresses = list(dict.fromkeys((*addresses, *stats)))

    def collect(self) -> Iterable[Metric]:
        yield self._up()
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _up(self) -> Metric:
        gauge = GaugeMetricFamily(
            "lockstep_engine_up",
            "Whether an engine answers, 1 or 0; all else is told of those alone that do.",
            labels=["engine"],
        )
        for engine in self._addresses:
            gauge.add_metric([engine], float(engine in self._stats))
        return gauge

    def _gauges(self) -> Iterator[Metric]:
        for name, help_text, number in GAUGES:
            gauge = GaugeMetricFamily(f"lockstep_{name}", help_text, labels=["engine"])
            for engine, stats in self._stats.items():
                gauge.add_metric([engine], number(stats))
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        for name, help_text, number in COUNTERS:
            counter = CounterMetricFamily(f"lockstep_{name}", help_text, labels=["engine"])
            for engine, stats in self._stats.items():
                counter.add_metric([engine], number(stats))
            yield counter
        for name, help_text, label, numbers in LABELLED_COUNTERS:
            counter = CounterMetricFamily(f"lockstep_{name}", help_text, labels=["engine", label])
            for engine, stats in self._stats.items():
                for value, number in numbers:
                    counter.add_metric([engine, value], number(stats))
            yield counter

    def _histograms(self) -> Iterator[Metric]:
        for name, help_text, values in HISTOGRAMS:
            family = HistogramMetricFamily(f"lockstep_{name}", help_text, labels=["engine"])
            for engine, stats in self._stats.items():
                _add(family, [engine], values(stats))
            yield family
        steps = HistogramMetricFamily(
            "lockstep_step_seconds",
            "A step on the engine's thread, by its parts; `total` is the whole of it.",
            labels=["engine", "part"],
        )
        for engine, stats in self._stats.items():
            for part, values in STEP_PARTS:
                _add(steps, [engine, part], values(stats))
        yield steps


def _add(family: HistogramMetricFamily, labels: list[str], values: HistogramSnapshot) -> None:
    """Prometheus counts in each bucket what is in those below it, too."""
    bounds = [*map(floatToGoString, values.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(values.counts), strict=True))
    family.add_metric(labels, buckets, values.sum)
