"""What can be set for replicas behind Ray Serve, beside what engines and frontends have."""

from dataclasses import dataclass

from runtime.config import MAX_TIMEOUT_S, require
from runtime.frontend_config import MAX_FRONTENDS
from runtime.options import option

MAX_REPLICAS = 1024
MAX_TARGET_QUEUE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasConfig:
    """How many there are, and when there are more."""

    frontends: int = option(1, "Frontends, each a process that has all replicas.")
    min_replicas: int = option(1, "Fewest engines.")
    max_replicas: int = option(1, "Most engines.")
    target_queue: float = option(
        2.0, "As many engines are wanted as leave each so many waiting sequences on average,"
    )
    target_kv_usage: float = option(
        0.8, "and none with more than this share of its KV cache in use on average."
    )
    look_back_s: float = option(30.0, "Queue and cache are averaged over so long.")
    upscale_delay_s: float = option(30.0, "More engines must be wanted for so long.")
    downscale_delay_s: float = option(600.0, "Fewer engines must be wanted for so long.")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("frontends", 1, MAX_FRONTENDS),
            ("min_replicas", 1, MAX_REPLICAS),
            ("max_replicas", self.min_replicas, MAX_REPLICAS),
            ("upscale_delay_s", 0, MAX_TIMEOUT_S),
            ("downscale_delay_s", 0, MAX_TIMEOUT_S),
        ):
            value = getattr(self, name)
            require(low <= value <= high, f"{name}={value} must be in [{low}, {high}]")
        for name, most in (
            ("look_back_s", MAX_TIMEOUT_S),
            ("target_queue", MAX_TARGET_QUEUE),
            ("target_kv_usage", 1),
        ):
            value = getattr(self, name)
            require(0 < value <= most, f"{name}={value} must be in (0, {most}]")
