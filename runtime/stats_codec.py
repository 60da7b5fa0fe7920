"""Between EngineStats and its message in common.proto."""

from dataclasses import asdict
from typing import Any

from protos import common_pb2
from runtime.histogram import HistogramSnapshot
from runtime.request import EngineStats, RankSummary, StepSeconds, StepSummary

NUMBERS = tuple(
    field.name for field in common_pb2.EngineStats.DESCRIPTOR.fields if field.message_type is None
)
HISTOGRAMS = tuple(
    field.name
    for field in common_pb2.EngineStats.DESCRIPTOR.fields
    if field.message_type is common_pb2.Histogram.DESCRIPTOR
)
SUMMARY = tuple(field.name for field in common_pb2.StepSummary.DESCRIPTOR.fields)
PARTS = tuple(field.name for field in common_pb2.StepSeconds.DESCRIPTOR.fields)


def encode_stats(stats: EngineStats) -> common_pb2.EngineStats:
    values: dict[str, Any] = {name: getattr(stats, name) for name in NUMBERS}
    values |= {name: _encode_histogram(getattr(stats, name)) for name in HISTOGRAMS}
    last = stats.last_step
    return common_pb2.EngineStats(
        **values,
        step_s=common_pb2.StepSeconds(
            **{name: _encode_histogram(getattr(stats.step_s, name)) for name in PARTS}
        ),
        last_step=None if last is None else common_pb2.StepSummary(**asdict(last)),
        ranks=[common_pb2.RankSummary(**asdict(each)) for each in stats.ranks],
    )


def decode_stats(message: common_pb2.EngineStats) -> EngineStats:
    """Raises ValueError: the counts of a histogram don't fit its bounds."""
    values: dict[str, Any] = {name: getattr(message, name) for name in NUMBERS}
    values |= {name: _decode_histogram(name, getattr(message, name)) for name in HISTOGRAMS}
    return EngineStats(
        **values,
        step_s=StepSeconds(
            **{name: _decode_histogram(name, getattr(message.step_s, name)) for name in PARTS}
        ),
        last_step=_decode_summary(message.last_step) if message.HasField("last_step") else None,
        ranks=tuple(
            RankSummary(each.rank, each.prepare_s, each.forward_s, each.sample_s)
            for each in message.ranks
        ),
    )


def _decode_summary(message: common_pb2.StepSummary) -> StepSummary:
    return StepSummary(**{name: getattr(message, name) for name in SUMMARY})


def _encode_histogram(histogram: HistogramSnapshot) -> common_pb2.Histogram:
    return common_pb2.Histogram(bounds=histogram.bounds, counts=histogram.counts, sum=histogram.sum)


def _decode_histogram(name: str, message: common_pb2.Histogram) -> HistogramSnapshot:
    try:
        return HistogramSnapshot(tuple(message.bounds), tuple(message.counts), message.sum)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
