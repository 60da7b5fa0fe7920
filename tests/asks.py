"""Requests of every kind of sampling, for a model with the vocabulary below."""

import random
from pathlib import Path

from runtime.sampling_params import SamplingParams
from tests.tiny_engine import Ask
from tests.tiny_models import save_tiny_model
from tests.tokenizing import EOS, TOKENIZERS

TOKENIZER = TOKENIZERS["byte-level"]
VOCAB_SIZE = 400
NUM_NEW = 24
SHAPE = '{"items": {"enum": ["é", 20, [null]]}, "type": "array", "minItems": 4, "maxItems": 9}'


def save_model(folder: Path, family: str, **changes: object) -> Path:
    """A tiny model that ends texts, with its tokenizer."""
    changes = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS} | changes
    save_tiny_model(folder, family, **changes)
    TOKENIZER._tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def draw_prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, VOCAB_SIZE) for _ in range(length)]


def _endless(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_NEW, "ignore_eos": True, "logprobs": 2} | fields)


def _ask(length: int, params: SamplingParams, **fields: object) -> Ask:
    return Ask(prompt=draw_prompt(length, length), params=params, seed=2**63 + length, **fields)


EVERYTHING = _endless(
    temperature=1.2,
    top_k=100,
    top_p=0.95,
    min_p=0.001,
    presence_penalty=0.5,
    frequency_penalty=0.7,
    repetition_penalty=1.2,
    logit_bias={7: 6.0, 8: 5.5, 9: -50.0, EOS: 3.0},
    logprobs=5,
)

KINDS: dict[str, Ask] = {
    "temperature": _ask(29, _endless(temperature=1.3, logprobs=0)),
    "top-k and top-p": _ask(30, _endless(top_k=40, top_p=0.9)),
    "top-p": _ask(31, _endless(temperature=1.5, top_p=0.8)),
    "min-p": _ask(32, _endless(temperature=2.0, min_p=0.02)),
    "everything": _ask(33, EVERYTHING, bad_words=((7, 8), (8,), (7, 7, 7), (300, 301, 302))),
    "n": _ask(34, _endless(temperature=1.5, n=3)),
    "structured": _ask(
        35, SamplingParams(max_tokens=80, json_schema=SHAPE, temperature=1.5, logprobs=2)
    ),
    "ends": _ask(
        36,
        SamplingParams(
            max_tokens=NUM_NEW,
            min_tokens=9,
            stop_token_ids=tuple(range(20, 60)),
            temperature=3.0,
            logprobs=2,
        ),
    ),
}


def batch_mates(seed: int) -> list[Ask]:
    """Seven requests of all kinds, whose seeds are drawn."""
    source = random.Random(seed)
    each = [
        _endless(temperature=0.0),
        _endless(repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=-1.0),
        SamplingParams(max_tokens=NUM_NEW, regex="[a-z]{12,}", temperature=2.0),
        _endless(logit_bias=dict.fromkeys(range(50, 90), 4.0), temperature=1.5),
        _endless(logprobs=20, prompt_logprobs=3, min_p=0.1),
        _endless(allowed_token_ids=tuple(range(100, 140)), top_p=0.7),
        _endless(top_k=5, temperature=5.0),
    ]
    mates = [
        Ask(
            prompt=draw_prompt(source.randrange(3, 40), source.random()),
            params=params,
            seed=source.getrandbits(64),
            bad_words=((50, 51), (100,), (120, 121)),
        )
        for params in each
    ]
    source.shuffle(mates)
    return mates
