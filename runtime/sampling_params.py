"""How the tokens of one request are chosen and when it ends."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from runtime.errors import InvalidRequestError
from runtime.options import option
from runtime.structure import STRUCTURE_KINDS, Structure

MAX_SEED = 2**64 - 1
MAX_INT32 = 2**31 - 1
MAX_CHOICES = 128
MIN_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 1e5
MIN_TOP_P = 1e-9  # the most probable token alone; far smaller ones would be 0 in float32
MAX_PENALTY = 2.0
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0
MAX_BIAS = 100.0
MAX_LOGPROBS = 20
MAX_TEXT_CHARS = 1024  # of a stop string and of a bad word
MAX_STRUCTURE_BYTES = 64 << 10
# Most entries of lists: a longer one would hold up other requests while it is looked at.
MAX_ENTRIES = {
    "logit_bias": 1024,
    "allowed_token_ids": 1 << 18,
    "bad_words": 256,
    "stop": 16,
    "stop_token_ids": 256,
    "choices": 4096,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a model puts where requests leave a field unset; here Lockstep's own values."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


DEFAULTED = tuple(each.name for each in fields(SamplingDefaults))
LOCKSTEP_DEFAULTS = SamplingDefaults()


def _defaulted(name: str, help: str) -> Any:
    own = getattr(LOCKSTEP_DEFAULTS, name)
    return option(None, f"{help} The model's default where unset, or else {own:g}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a client asks for. None in a field of SamplingDefaults: the model's default.

    Raises InvalidRequestError where a field is out of range; limits that depend on the model are
    checked at admission. Lists become tuples.
    """

    max_tokens: int | None = _defaulted("max_tokens", "Most new tokens.")
    temperature: float | None = _defaulted("temperature", "Logits are divided by it; 0 is greedy.")
    top_k: int | None = _defaulted("top_k", "Keep exactly the k most probable tokens; 0 keeps all.")
    top_p: float | None = _defaulted(
        "top_p", "Keep the most probable tokens that reach this probability."
    )
    min_p: float | None = _defaulted(
        "min_p", "Keep the tokens whose probability is at least min_p times the largest."
    )
    seed: int | None = option(None, "64-bit seed; drawn where unset.")
    n: int = option(1, "Choices, which share the prompt's blocks; each has a seed of its own.")

    presence_penalty: float = option(0.0, "Taken off the logits of tokens that the output has.")
    frequency_penalty: float = option(0.0, "The same, for each time that the output has one.")
    repetition_penalty: float | None = _defaulted(
        "repetition_penalty",
        "Divides positive logits of tokens of prompt and output, multiplies negative ones.",
    )
    logit_bias: Mapping[int, float] | None = option(
        None, "Added to a token's logit, as ID=BIAS; may be given again."
    )
    allowed_token_ids: tuple[int, ...] = option(
        (), "Only these tokens are sampled; may be given again."
    )
    bad_words: tuple[str, ...] = option(
        (), "A text whose tokens, as the tokenizer writes it, won't come; may be given again."
    )

    min_tokens: int = option(0, "No end token is sampled before so many new tokens.")
    ignore_eos: bool = option(False, "Go on after an end-of-sequence token.")
    stop: tuple[str, ...] = option((), "A text that ends the output; may be given again.")
    stop_token_ids: tuple[int, ...] = option(
        (), "A token that ends the output; may be given again."
    )
    include_stop_str_in_output: bool = option(False, "Keep the stop string in the text.")
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.")

    logprobs: int | None = option(
        None, "Tell the log probability of each token, and of so many most probable ones."
    )
    prompt_logprobs: int | None = option(None, "The same for the tokens of the prompt.")

    json_schema: str | None = option(None, "JSON Schema that the output follows.")
    regex: str | None = option(None, "Regular expression that the whole output matches.")
    grammar: str | None = option(None, "Grammar of the output, in the notation of Lark.")
    choices: tuple[str, ...] = option((), "The output is one of these; may be given again.")

    def __post_init__(self) -> None:
        self._check_types()
        for name, low, high, low_note in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # NaN fails both comparisons
                raise InvalidRequestError(f"{name}={value} must be {low_note or _in(low, high)}")
        # The bounds keep a logit over the temperature within float32.
        if not (
            self.temperature in (None, 0) or MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE
        ):
            raise InvalidRequestError(
                f"temperature={self.temperature} must be 0 (greedy) or in "
                f"[{MIN_TEMPERATURE}, {MAX_TEMPERATURE}]"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} must be at least 0 and at most "
                f"max_tokens={self.max_tokens}"
            )
        self._check_lists()
        self._check_structure()

    def complete(self, defaults: SamplingDefaults) -> "CompleteParams":
        """With `defaults` for what is unset.

        Raises InvalidRequestError: a field doesn't go with one of them.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        unset = [name for name in DEFAULTED if values[name] is None]
        return CompleteParams(**values | {name: getattr(defaults, name) for name in unset})

    @property
    def structure(self) -> Structure | None:
        """The form that the output must have."""
        for kind in STRUCTURE_KINDS:
            text = getattr(self, kind)
            if kind == "choices":
                text = json.dumps(text) if text else None
            if text is not None:
                return Structure(kind=kind, text=text)
        return None

    def _check_types(self) -> None:
        """What comes over the wire is typed; an offline caller may pass anything."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, list | tuple | Mapping):
                check_length(each.name, len(value))
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, each.name, value)  # as dataclasses do in __init__
            if not _FITS[each.type](value):
                kind = each.type.__name__ if isinstance(each.type, type) else str(each.type)
                raise InvalidRequestError(
                    f"{each.name}={value!r} is of type {type(value).__name__}: must be {kind}"
                )

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words", "choices"):
            for place, text in enumerate(getattr(self, name)):
                if not text:
                    raise InvalidRequestError(f"{name}[{place}] is empty: it must have a character")
                if name != "choices" and len(text) > MAX_TEXT_CHARS:
                    raise InvalidRequestError(
                        f"{name}[{place}] has {len(text)} characters: must be at most "
                        f"{MAX_TEXT_CHARS}"
                    )
        for token, bias in (self.logit_bias or {}).items():
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise InvalidRequestError(
                    f"logit_bias[{token}]={bias} must be {_in(-MAX_BIAS, MAX_BIAS)}"
                )

    def _check_structure(self) -> None:
        names = [kind for kind in STRUCTURE_KINDS if getattr(self, kind) not in (None, ())]
        if len(names) > 1:
            raise InvalidRequestError(f"{' and '.join(names)} are set: at most one may be")
        structure = self.structure
        num_bytes = 0 if structure is None else len(structure.text.encode(errors="replace"))
        if num_bytes > MAX_STRUCTURE_BYTES:
            raise InvalidRequestError(
                f"{names[0]} has {num_bytes} bytes: must be at most {MAX_STRUCTURE_BYTES}"
            )
        for other in ("ignore_eos", "min_tokens"):
            if names and getattr(self, other):
                raise InvalidRequestError(
                    f"{other}={getattr(self, other)} is set with {names[0]}: an output that is "
                    "complete must end"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteParams(SamplingParams):
    """What the engine goes by: nothing is left to defaults."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float

    @property
    def has_penalties(self) -> bool:
        """Whether sampling depends on which tokens there are already."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


# Field, least, most, and what to say where an interval says too little.
_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("max_tokens", 1, MAX_INT32, f"at least 1 and at most {MAX_INT32}"),
    ("min_tokens", 0, MAX_INT32, "at least 0 and at most max_tokens"),
    ("top_k", 0, MAX_INT32, f"at least 0 (which keeps all tokens) and at most {MAX_INT32}"),
    ("top_p", MIN_TOP_P, 1, ""),
    ("min_p", 0, 1, ""),
    ("seed", 0, MAX_SEED, "in [0, 2**64)"),
    ("n", 1, MAX_CHOICES, ""),
    ("presence_penalty", -MAX_PENALTY, MAX_PENALTY, ""),
    ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY, ""),
    ("repetition_penalty", MIN_REPETITION, MAX_REPETITION, ""),
    ("logprobs", 0, MAX_LOGPROBS, ""),
    ("prompt_logprobs", 0, MAX_LOGPROBS, ""),
)


def check_length(name: str, count: int) -> None:
    """Raises InvalidRequestError: the list `name` has too many entries."""
    most = MAX_ENTRIES.get(name, count)
    if count > most:
        raise InvalidRequestError(f"{name} has {count} entries: must be at most {most}")


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _all(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(map(fits, value))


# By a field's type, whether a value is one.
_FITS: dict[Any, Callable[[object], bool]] = {
    bool: lambda value: isinstance(value, bool),
    int: _is_int,
    float: _is_number,
    int | None: lambda value: value is None or _is_int(value),
    float | None: lambda value: value is None or _is_number(value),
    str | None: lambda value: value is None or isinstance(value, str),
    tuple[int, ...]: _all(_is_int),
    tuple[str, ...]: _all(lambda value: isinstance(value, str)),
    Mapping[int, float] | None: lambda value: (
        value is None
        or (
            isinstance(value, Mapping)
            and all(map(_is_int, value))
            and all(map(_is_number, value.values()))
        )
    ),
}


def _in(low: float, high: float) -> str:
    return f"in [{low:g}, {high:g}]"


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
