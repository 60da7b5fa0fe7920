"""How the tokens of one request are chosen and when it ends."""

import math
from dataclasses import dataclass

from runtime.errors import InvalidRequestError

MAX_SEED = 2**64 - 1
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Raises InvalidRequestError where a field is out of range.

    Limits that depend on the model are checked at admission.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens <= MAX_INT32:
            raise InvalidRequestError(f"max_tokens={self.max_tokens} must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequestError(
                f"temperature={self.temperature} must be finite and at least 0 (0 is greedy)"
            )
        if not 0 <= self.top_k <= MAX_INT32:
            raise InvalidRequestError(f"top_k={self.top_k} must be at least 0 (0 keeps all tokens)")
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p={self.top_p} must be in (0, 1]")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequestError(f"seed={self.seed} must be in [0, 2**64)")
