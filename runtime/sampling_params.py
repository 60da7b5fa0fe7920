"""How the tokens of one request are chosen and when it ends."""

from dataclasses import dataclass, fields

from runtime.errors import InvalidRequestError
from runtime.options import option

MAX_SEED = 2**64 - 1
MAX_INT32 = 2**31 - 1
MAX_CHOICES = 128
MIN_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 1e5
MIN_TOP_P = 1e-9  # the most probable token alone; far smaller ones would be 0 in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Raises InvalidRequestError where a field is out of range.

    Limits that depend on the model are checked at admission.
    """

    max_tokens: int = option(16, "Most new tokens.")
    temperature: float = option(1.0, "Logits are divided by it; 0 is greedy.")
    top_k: int = option(0, "Keep exactly the k most probable tokens; 0 keeps all.")
    top_p: float = option(1.0, "Keep the most probable tokens that reach this probability.")
    seed: int | None = option(None, "64-bit seed; drawn where unset.")
    ignore_eos: bool = option(False, "Go on after an end-of-sequence token.")
    n: int = option(1, "Choices, which share the prompt's blocks; each has a seed of its own.")
    min_tokens: int = option(0, "No end-of-sequence token is sampled before so many new tokens.")

    def __post_init__(self) -> None:
        self._check_types()
        if not 1 <= self.max_tokens <= MAX_INT32:
            raise InvalidRequestError(
                f"max_tokens={self.max_tokens} must be at least 1 and at most {MAX_INT32}"
            )
        # NaN fails both comparisons. The bounds keep a logit over the temperature within float32.
        if not (self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE):
            raise InvalidRequestError(
                f"temperature={self.temperature} must be 0 (greedy) or in "
                f"[{MIN_TEMPERATURE}, {MAX_TEMPERATURE}]"
            )
        if not 0 <= self.top_k <= MAX_INT32:
            raise InvalidRequestError(
                f"top_k={self.top_k} must be at least 0 (which keeps all tokens) "
                f"and at most {MAX_INT32}"
            )
        if not MIN_TOP_P <= self.top_p <= 1:
            raise InvalidRequestError(f"top_p={self.top_p} must be in [{MIN_TOP_P}, 1]")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequestError(f"seed={self.seed} must be in [0, 2**64)")
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidRequestError(f"n={self.n} must be in [1, {MAX_CHOICES}]")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} must be at least 0 and at most "
                f"max_tokens={self.max_tokens}"
            )

    def _check_types(self) -> None:
        """What comes over the wire is typed; an offline caller may pass anything."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                fits = isinstance(value, bool)
            elif field.type is float:
                fits = isinstance(value, int | float) and not isinstance(value, bool)
            else:
                optional = field.default is None
                fits = (type(value) is int) or (optional and value is None)
            if not fits:
                raise InvalidRequestError(
                    f"{field.name}={value!r} is of type {type(value).__name__}: "
                    f"must be {getattr(field.type, '__name__', field.type)}"
                )


def fork_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with `seed`: for choice 0 the seed itself.

    Choice i gets the i-th number of the generator splitmix64 started at `seed` (Steele, Lea, Flood:
    Fast Splittable Pseudorandom Number Generators, 2014), so that the seeds of one request differ
    from each other, and those of neighbouring seeds don't meet.
    """
    if index == 0:
        return seed
    bits = (seed + index * 0x9E3779B97F4A7C15) & MAX_SEED
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return bits ^ (bits >> 31)
