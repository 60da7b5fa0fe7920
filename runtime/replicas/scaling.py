"""How many engines there should be."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from runtime.request import EngineStats

QUEUED = "queued"
KV_USAGE = "kv_usage"
# So little off the target is no reason to change anything.
TOLERANCE = 0.1


def load_of(stats: EngineStats) -> dict[str, float]:
    """What of an engine's statistics its number goes by."""
    in_use = stats.num_blocks - stats.num_free_blocks
    return {QUEUED: float(stats.num_waiting), KV_USAGE: in_use / max(1, stats.num_blocks)}


def wanted_engines(
    num_engines: int,
    *,
    queued: Collection[float],
    kv_usage: Collection[float],
    target_queue: float,
    target_kv_usage: float,
) -> float:
    """So many that what there are now would have their targets, to be rounded up.

    `queued` and `kv_usage` are of those that have told theirs.
    """
    if not queued or not kv_usage:
        return num_engines
    ratio = max(
        sum(queued) / len(queued) / target_queue, sum(kv_usage) / len(kv_usage) / target_kv_usage
    )
    return num_engines if abs(ratio - 1) <= TOLERANCE else num_engines * ratio


class ServeContext(Protocol):
    """What is needed of Ray Serve's AutoscalingContext."""

    current_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]]: ...


class ScalingPolicy:
    """A policy for Ray Serve, which applies its delays and rounds up."""

    def __init__(self, target_queue: float, target_kv_usage: float) -> None:
        self._target_queue = target_queue
        self._target_kv_usage = target_kv_usage

    def __call__(self, context: ServeContext) -> tuple[float, dict[str, Any]]:
        loads = context.aggregated_metrics
        wanted = wanted_engines(
            context.current_num_replicas,
            queued=loads.get(QUEUED, {}).values(),
            kv_usage=loads.get(KV_USAGE, {}).values(),
            target_queue=self._target_queue,
            target_kv_usage=self._target_kv_usage,
        )
        most = context.capacity_adjusted_max_replicas
        return max(context.capacity_adjusted_min_replicas, min(wanted, most)), {}
