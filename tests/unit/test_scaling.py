"""How many engines there should be, by their queues and caches."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.replicas.config import ReplicasConfig
from runtime.replicas.scaling import KV_USAGE, QUEUED, ScalingPolicy, load_of, wanted_engines
from tests.engine_stats import make_stats

pytestmark = pytest.mark.unit


def wanted(num_engines: int, queued: list[float], kv_usage: list[float]) -> float:
    return wanted_engines(
        num_engines, queued=queued, kv_usage=kv_usage, target_queue=2.0, target_kv_usage=0.8
    )


@pytest.mark.parametrize(
    ("queued", "kv_usage", "expected"),
    [
        ([2.0, 2.0], [0.1, 0.1], 2),  # what is wanted
        ([2.1, 2.0], [0.1, 0.1], 2),  # near enough
        ([8.0, 0.0], [0.1, 0.1], 4),  # queues count on average
        ([0.0, 0.0], [1.0, 1.0], 2.5),  # a cache that is full wants more without a queue
        ([8.0, 8.0], [1.0, 1.0], 8),  # who wants more has it
        ([0.0, 0.0], [0.1, 0.1], 0.25),
        ([], [], 2),  # none has told its load yet
    ],
)
def test_as_many_as_have_their_targets(
    queued: list[float], kv_usage: list[float], expected: float
) -> None:
    assert wanted(2, queued, kv_usage) == pytest.approx(expected)


def test_the_load_of_an_engine() -> None:
    stats = make_stats(num_waiting=3, num_blocks=100, num_free_blocks=25)
    assert load_of(stats) == {QUEUED: 3.0, KV_USAGE: 0.75}


@dataclass
class Context:
    """As Ray Serve's, of two replicas that may become between one and three."""

    current_num_replicas: int = 2
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 3
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({}, 2),
        ({QUEUED: {"a": 9.0, "b": 9.0}, KV_USAGE: {"a": 0.5, "b": 0.5}}, 3),
        ({QUEUED: {"a": 0.0, "b": 0.0}, KV_USAGE: {"a": 0.1, "b": 0.1}}, 1),
    ],
)
def test_ray_serves_bounds_hold(metrics: dict[str, dict[str, float]], expected: int) -> None:
    policy = ScalingPolicy(target_queue=2.0, target_kv_usage=0.8)
    assert policy(Context(aggregated_metrics=metrics)) == (expected, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, r"max_replicas=2 must be in \[3, 1024\]"),
        ({"frontends": 33}, r"frontends=33 must be in \[1, 32\]"),
        ({"target_kv_usage": 1.5}, r"target_kv_usage=1.5 must be in \(0, 1\]"),
        ({"look_back_s": 0.0}, r"look_back_s=0.0 must be in \(0, 604800\]"),
    ],
)
def test_what_can_not_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplicasConfig(**options)
