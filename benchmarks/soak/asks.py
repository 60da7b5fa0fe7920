"""What clients ask for: every parameter that changes how tokens are chosen or where they end."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase
from typing import Any, Literal

Way = Literal["grpc", "http", "chat"]

# Few, as in a language: the tokenizer remembers those that it has seen, up to 10,000.
WORDS = tuple("".join(Random(n).choices(ascii_lowercase, k=2 + n % 8)) for n in range(200))
# Prompts begin alike, as those of one application do.
BEGINNINGS = tuple(" ".join(Random(n).choices(WORDS, k=2 * n)) for n in range(8))
MAX_TAIL = 10  # words
MAX_TOKENS = (1, 8, 40, 120, 240)
MAX_MODEL_LEN = 512  # has room for the longest prompt, the frame of a chat, and output
PRIORITIES = (0, 0, 0, 0, 1, -1)
REGEX = "[a-z]{2,12}-[0-9]{1,4}"
LISTED = ("first", "second", "second and last", "none of them")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "even": {"type": "boolean"}},
    "required": ["name", "even"],
    "additionalProperties": False,
}

Params = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request; its parameters have the same names in both APIs."""

    kind: str
    prompt: str
    params: Mapping[str, Any]
    priority: int = 0

    @property
    def num_choices(self) -> int:
        return int(self.params.get("n", 1))

    @property
    def ways(self) -> tuple[Way, ...]:
        """Where these parameters are taken, in streams."""
        match self.kind:
            case "scores":
                return ("grpc",)
            case "logprobs":
                return ("grpc", "http")
            case _:
                return ("grpc", "http", "chat")


def _filtered(draw: Random) -> Params:
    limit: Params = draw.choice(({"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}))
    return {"temperature": draw.choice((0.7, 1.0, 1.4)), **limit}


def _penalized(draw: Random) -> Params:
    return {
        "presence_penalty": draw.choice((0.0, 0.6)),
        "frequency_penalty": 0.4,
        "repetition_penalty": draw.choice((1.0, 1.2)),
    }


def _kept_from(draw: Random) -> Params:
    words = ["".join(draw.choices(ascii_lowercase, k=2)) for _ in range(3)]
    biases = {draw.randrange(256): draw.choice((-100.0, 2.0)) for _ in range(4)}
    return {"bad_words": words, "logit_bias": biases}


KINDS: Mapping[str, Callable[[Random], Params]] = {
    "greedy": lambda draw: {"temperature": 0.0},
    "sampled": lambda draw: {"temperature": draw.choice((0.5, 1.0, 2.0))},
    "filtered": _filtered,
    "penalties": _penalized,
    "words": _kept_from,
    "logprobs": lambda draw: {"logprobs": draw.randrange(4)},
    "scores": lambda draw: {"prompt_logprobs": draw.randrange(3)},
    "choices": lambda draw: {"n": draw.randrange(2, 5)},
    "stop": lambda draw: {"stop": draw.sample(ascii_lowercase, 6)},
    "stop ids": lambda draw: {
        "stop_token_ids": draw.sample(range(256), 20),
        "min_tokens": 1,
        "ignore_eos": True,
    },
    "regex": lambda draw: {"regex": REGEX},
    "listed": lambda draw: {"choices": LISTED},
    "schema": lambda draw: {"json_schema": json.dumps(SCHEMA)},
}


def draw_ask(draw: Random, kind: str | None = None) -> Ask:
    kind = kind or draw.choice(tuple(KINDS))
    tail = " ".join(draw.choices(WORDS, k=draw.randrange(1, MAX_TAIL + 1)))
    params = {"max_tokens": draw.choice(MAX_TOKENS), "seed": draw.getrandbits(63)}
    return Ask(
        kind=kind,
        prompt=f"{draw.choice(BEGINNINGS)} {tail}",
        params=params | KINDS[kind](draw),
        priority=draw.choice(PRIORITIES),
    )


def make_probes(count: int) -> list[Ask]:
    """The same ones every time, of each kind."""
    kinds = tuple(KINDS)
    return [draw_ask(Random(n), kinds[n % len(kinds)]) for n in range(count)]


def find_fault(ask: Ask, texts: Mapping[int, str], ends: Mapping[int, str]) -> str | None:
    """What is wrong with an answer: `texts` and why they ended (stop or length), by choice."""
    if sorted(ends) != list(range(ask.num_choices)):
        return f"{len(ends)} of {ask.num_choices} choices ended"
    for choice, end in ends.items():
        text = texts.get(choice, "")
        if end not in ("stop", "length"):
            return f"choice {choice} ended by {end!r}"
        if end == "stop" and not _has_form(ask, text):
            return f"choice {choice} is {text!r}"
        if any(each in text for each in ask.params.get("stop", ())):
            return f"choice {choice} has a stop string: {text!r}"
    return None


def _has_form(ask: Ask, text: str) -> bool:
    match ask.kind:
        case "regex":
            return re.fullmatch(REGEX, text) is not None
        case "listed":
            return text in LISTED
        case "schema":
            return _has_both(text)
        case _:
            return True


def _has_both(text: str) -> bool:
    try:
        return set(json.loads(text)) == set(SCHEMA["required"])
    except ValueError:
        return False
