"""Structured output of a tiny model at a high temperature: always what was asked for."""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest

from runtime.grammar.compiler import GrammarCompiler
from runtime.request import FinishReason
from runtime.sampling_params import SamplingParams
from tests.asks import EOS, TOKENIZER, VOCAB_SIZE, draw_prompt, save_model
from tests.local_ranks import Rank, load_ranks
from tests.structures import CHOICES, GRAMMARS, REGEXES, SCHEMAS
from tests.tiny_engine import Answer, Ask, TinyEngine, WaitingCompiler, check_equal

pytestmark = pytest.mark.cpu

TEMPERATURE = 1.5
MAX_TOKENS = 200
TOGETHER = 8

Check = Callable[[str], object]
Case = tuple[SamplingParams, Check]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    return save_model(folder, "llama")


@pytest.fixture(scope="module")
def ranks(folder) -> Iterator[list[Rank]]:
    with load_ranks(folder) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def compiler(folder) -> Iterator[WaitingCompiler]:
    compiler = GrammarCompiler(str(folder), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    yield WaitingCompiler(compiler)
    compiler.close()


def make_params(number: int, **structure: object) -> SamplingParams:
    """Every fifth request has two choices."""
    return SamplingParams(
        max_tokens=MAX_TOKENS, temperature=TEMPERATURE, n=1 + (number % 5 == 4), **structure
    )


def schema_case(number: int) -> Case:
    schema = SCHEMAS[number]
    validator = jsonschema.Draft202012Validator(schema)
    params = make_params(number, json_schema=json.dumps(schema))
    return params, lambda text: validator.validate(json.loads(text))


def regex_case(number: int) -> Case:
    pattern = REGEXES[number]
    return make_params(number, regex=pattern), matches(pattern)


def other_cases() -> list[Case]:
    grammars = [
        (make_params(number, grammar=grammar), matches(pattern))
        for number, (grammar, pattern) in enumerate(GRAMMARS)
    ]
    choices = [
        (make_params(number, choices=tuple(texts)), texts.index)
        for number, texts in enumerate(CHOICES)
    ]
    return grammars + choices


def matches(pattern: str) -> Check:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, "".join(map(known, text))), text

    return check


def known(char: str) -> str:
    """A digit for a character newer than this Python's Unicode: our expressions take either."""
    return "0" if unicodedata.category(char) == "Cn" else char


def check_case(ask: Ask, check: Check, answers: list[Answer]) -> int:
    """All that ended is valid; returns how many ended."""
    ended = [each for each in answers if each.finish_reason is FinishReason.STOP]
    for each in answers:
        *token_ids, last = each.token_ids
        if each in ended:
            assert last == EOS
            check(TOKENIZER.decode(token_ids))
        else:
            assert len(each.token_ids) == ask.params.max_tokens
    return len(ended)


def run_cases(
    ranks: list[Rank],
    compiler: WaitingCompiler,
    cases: list[Case],
    *,
    num_alone: int,
    first_seed: int = 0,
) -> int:
    """Eight at a time, preempted often, then some alone; returns how many of the choices ended."""
    num_ended = 0
    num_preemptions = 0
    for start in range(0, len(cases), TOGETHER):
        part = cases[start : start + TOGETHER]
        asks = [
            Ask(prompt=draw_prompt(24, seed), params=params, seed=seed)
            for seed, (params, _) in enumerate(part, first_seed + start)
        ]
        served = TinyEngine(ranks, compiler=compiler, max_num_seqs=TOGETHER, preempt_every=3)
        together = served.run(*asks)
        assert not served.failures
        num_preemptions += len(served.preempted)
        for ask, (_, check), answers in zip(asks, part, together, strict=True):
            num_ended += check_case(ask, check, answers)
        for ask, answers in list(zip(asks, together, strict=True))[:num_alone]:
            check_equal(TinyEngine(ranks, compiler=compiler).run(ask)[0], answers)
    assert num_preemptions > 0
    return num_ended


def test_some_of_the_structures(ranks, compiler) -> None:
    cases = [schema_case(number) for number in range(0, len(SCHEMAS), 6)]
    cases += [regex_case(number) for number in range(0, len(REGEXES), 5)]
    cases += other_cases()[::4]
    num_choices = sum(params.n for params, _ in cases)
    assert run_cases(ranks, compiler, cases, num_alone=1) >= 0.7 * num_choices


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("cases", "least"),
    [
        ([schema_case(number) for number in range(len(SCHEMAS))], 54),
        ([regex_case(number) for number in range(len(REGEXES))], 21),
        (other_cases(), 12),
    ],
    ids=["schemas", "regexes", "others"],
)
@pytest.mark.parametrize("first_seed", [0, 1000, 2000])
def test_all_of_the_structures(ranks, compiler, cases, least, first_seed) -> None:
    """Nine in ten end by themselves."""
    num_ended = run_cases(ranks, compiler, cases, num_alone=TOGETHER, first_seed=first_seed)
    assert num_ended >= least
