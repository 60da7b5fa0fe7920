"""A real model goes on in an engine that has never seen the request, wherever it was cut."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from runtime.grammar.compiler import GrammarCompiler
from runtime.request import ResumedChoice
from tests.asks import EOS, KINDS, VOCAB_SIZE, batch_mates, draw_prompt, save_model
from tests.local_ranks import Rank, load_ranks
from tests.quick import quick
from tests.tiny_engine import Answer, Ask, TinyEngine, WaitingCompiler, check_equal

pytestmark = pytest.mark.cpu

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma3", marks=pytest.mark.full)])
def folder(request, tmp_path_factory) -> Path:
    changes = {"gemma3": {"tie_word_embeddings": False}}.get(request.param, {})
    folder = tmp_path_factory.mktemp("models") / request.param
    return save_model(folder, request.param, **changes)


@pytest.fixture(scope="module")
def ranks(folder) -> Iterator[list[Rank]]:
    with load_ranks(folder) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def compiler(folder) -> Iterator[WaitingCompiler]:
    compiler = GrammarCompiler(str(folder), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])
    yield WaitingCompiler(compiler)
    compiler.close()


@pytest.fixture(scope="module")
def alone(ranks, compiler) -> dict[str, list[Answer]]:
    """What each kind gets without a disturbance."""
    return {kind: TinyEngine(ranks, compiler=compiler).run(ask)[0] for kind, ask in KINDS.items()}


def cut_at(ask: Ask, whole: Sequence[Answer], lengths: Sequence[int]) -> Ask:
    """The request of somebody who has got so many tokens of each choice."""
    past = [
        ResumedChoice(tuple(each.token_ids[:length]), length >= len(each.token_ids))
        for each, length in zip(whole, lengths, strict=True)
    ]
    return replace(ask, resumed=tuple(past))


def check_rest(ask: Ask, found: Sequence[Answer], whole: Sequence[Answer]) -> None:
    for past, mine, theirs in zip(ask.resumed, found, whole, strict=True):
        if past.has_ended:
            assert mine == Answer()
            continue
        start = len(past.token_ids)
        rest = Answer(
            theirs.token_ids[start:],
            theirs.logprobs[start:],
            [] if start else theirs.scores,
            theirs.finish_reason,
        )
        check_equal([mine], [rest])


def draw_cuts(whole: Sequence[Answer], seed: int) -> list[int]:
    """At least one choice has something left."""
    draw = random.Random(seed)
    cuts = [draw.randrange(len(each.token_ids) + 1) for each in whole]
    last = draw.randrange(len(whole))
    cuts[last] = min(cuts[last], len(whole[last].token_ids) - 1)
    return cuts


@pytest.mark.parametrize(
    ("kind", "seed"),
    quick(product(KINDS, range(4)), *((kind, 0) for kind in ("everything", "n", "structured"))),
)
def test_alone_and_in_a_batch(ranks, compiler, alone, kind, seed) -> None:
    """Each seed cuts it elsewhere, and draws others beside it."""
    ask = cut_at(KINDS[kind], alone[kind], draw_cuts(alone[kind], seed))
    check_rest(ask, TinyEngine(ranks, compiler=compiler).run(ask)[0], alone[kind])
    served = TinyEngine(ranks, compiler=compiler)
    check_rest(ask, served.run(*batch_mates(seed), ask)[-1], alone[kind])
    assert not served.failures


@pytest.mark.full
@every_kind
def test_at_every_point(ranks, compiler, alone, kind) -> None:
    whole = alone[kind]
    for length in range(max(len(each.token_ids) for each in whole)):
        lengths = [max(0, length - 3 * index) for index in range(len(whole))]
        ask = cut_at(KINDS[kind], whole, lengths)
        check_rest(ask, TinyEngine(ranks, compiler=compiler).run(ask)[0], whole)


def test_all_kinds_together_preempted_on_the_same_engine(ranks, compiler, alone) -> None:
    """Its cache has them already."""
    served = TinyEngine(ranks, compiler=compiler, long_prefill_token_threshold=7, preempt_every=3)
    served.run(*KINDS.values())
    asks = [
        cut_at(ask, alone[kind], draw_cuts(alone[kind], seed))
        for seed, (kind, ask) in enumerate(KINDS.items())
    ]
    for kind, ask, answers in zip(KINDS, asks, served.run(*asks), strict=True):
        check_rest(ask, answers, alone[kind])
    assert served.preempted
    assert not served.failures


@pytest.mark.parametrize("length", quick([0, 1, 5], 1))
def test_scores_of_the_prompt_come_again_only_before_the_first_token(ranks, length) -> None:
    params = replace(KINDS["n"].params, prompt_logprobs=3, n=2)
    ask = Ask(prompt=draw_prompt(40, 1), params=params, seed=3)
    (whole,) = TinyEngine(ranks).run(ask)
    assert len(whole[0].scores) == 39
    again = cut_at(ask, whole, [length, 0])
    check_rest(again, TinyEngine(ranks).run(again)[0], whole)
