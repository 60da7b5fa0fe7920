"""The requests that are asked again and again: every kind of sampling and of end."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.chaos.model import NUM_BYTES

Way = Literal["grpc", "http"]

SEED = 2024
SHORT_PROMPT, LONG_PROMPT = (4, 60), (500, 900)
NUM_TOKENS = (60, 240)
# What prompts that begin alike share.
PREFIX_TOKENS = 96
LETTERS = range(64, 90)  # of the alphabet in the model's tokenizer: a to z
SHAPE = '{"type": "array", "items": {"enum": ["red", 20, [null]]}, "minItems": 9, "maxItems": 30}'

# Beside max_tokens and a seed. All go on after the end token, where nothing else is said.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2},
    "top-k, top-p": {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
    "min-p, biases": {"temperature": 1.5, "min_p": 0.02, "logit_bias": {7: 3.0, 9: -50.0}},
    "penalties": {
        "temperature": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
    },
    "two choices": {"temperature": 1.3, "n": 2},
    "schema": {"temperature": 1.5, "json_schema": SHAPE, "ignore_eos": False},
    "regex": {"temperature": 1.5, "regex": "([a-z]{3,9} ){12,40}", "ignore_eos": False},
    "stop string": {
        "temperature": 1.0,
        "allowed_token_ids": list(LETTERS),
        "stop": ["ab", "xyz", "qqq"],
    },
    "end token": {"temperature": 3.0, "min_tokens": 40, "ignore_eos": False},
    "log probabilities": {"temperature": 1.0, "logprobs": 3},
    "scored prompt": {"temperature": 1.0, "prompt_logprobs": 2},
    "long prompt": {"temperature": 0.0},
    "long sampled prompt": {"temperature": 1.0, "top_p": 0.95},
}
# What OpenAI's streams don't have.
BY_GRPC_ALONE = ("scored prompt",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request; the same each time that it is asked."""

    name: str
    way: Way
    prompt: tuple[int, ...]
    params: Mapping[str, Any] = field(hash=False)  # named as in SamplingParams


def draw_asks(count: int) -> list[Ask]:
    """All kinds in turn, by gRPC and by HTTP; the same list each time."""
    source = random.Random(SEED)
    prefix = _draw_tokens(source, PREFIX_TOKENS)
    return [_draw_ask(number, source, prefix) for number in range(count)]


def _draw_ask(number: int, source: random.Random, prefix: tuple[int, ...]) -> Ask:
    kind = list(KINDS)[number % len(KINDS)]
    is_long = kind.startswith("long")
    prompt = _draw_tokens(source, source.randint(*(LONG_PROMPT if is_long else SHORT_PROMPT)))
    if number % 3 == 0:
        prompt = prefix + prompt
    # Both ways for each kind: there is an even number of kinds.
    is_odd = (number + number // len(KINDS)) % 2
    way: Way = "grpc" if is_odd or kind in BY_GRPC_ALONE else "http"
    params = {
        "max_tokens": source.randint(*NUM_TOKENS),
        "ignore_eos": True,
        "seed": source.getrandbits(63),
        **KINDS[kind],
    }
    return Ask(name=f"{number} ({kind}, {way})", way=way, prompt=prompt, params=params)


def _draw_tokens(source: random.Random, count: int) -> tuple[int, ...]:
    return tuple(source.randrange(NUM_BYTES) for _ in range(count))
