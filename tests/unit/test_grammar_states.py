"""States that sequences of one structure share, and what becomes of them once they are used up."""

import random
from typing import TYPE_CHECKING

import pytest

from runtime.grammar.limits import GrammarLimits
from runtime.grammar.masks import masks_of
from runtime.grammar.matcher import CompiledGrammar, Matcher
from runtime.grammar.source import write_source
from runtime.structure import Structure
from tests.byte_vocabulary import make_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

pytestmark = pytest.mark.unit

TEXT = r"(.|\n)*a(.|\n){40}"  # random texts make new states of it for ever
MAX_STATES = 1500
REMAKING_S = 100.0


def make_grammar(*, remaking_s: float) -> CompiledGrammar:
    limits = GrammarLimits(max_lexer_states=MAX_STATES, remaking_s=remaking_s)
    source = write_source(Structure(kind="regex", text=TEXT), max_bytes=100)
    return CompiledGrammar(make_tokenizer(limits), "regex", source)


def draw_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(b"ab", k=count)


def stand_at(grammar: CompiledGrammar, tokens: list[int]) -> Matcher:
    matcher = grammar.matcher()
    matcher.replay(tokens)
    assert matcher.error is None
    return matcher


def use_up(start: "LLMatcher") -> None:
    """The states of this one and its copies; none of them is mended."""
    for seed in range(100, 200):
        state = start.deep_copy()
        for token in draw_tokens(seed, 60):
            state.compute_bitmask()
            if not state.consume_token(token):
                return
    raise AssertionError("never used up")


def test_all_go_on_together_where_there_is_time_to_compile_once() -> None:
    grammar = make_grammar(remaking_s=REMAKING_S)
    texts = [draw_tokens(seed, 10) for seed in range(20)]
    matchers = [stand_at(grammar, tokens) for tokens in texts]
    use_up(grammar.start())
    grammar._compile_s = REMAKING_S
    masks = masks_of(matchers)
    assert grammar.worn
    assert [matcher.error for matcher in matchers] == [None] * 20
    fresh = make_grammar(remaking_s=0)
    wanted = masks_of([stand_at(fresh, tokens) for tokens in texts])
    assert masks.words.tolist() == wanted.words.tolist()


def test_without_time_all_end_and_the_structure_is_worn() -> None:
    grammar = make_grammar(remaking_s=0)
    matchers = [stand_at(grammar, draw_tokens(seed, 10)) for seed in range(3)]
    use_up(grammar.start())
    assert masks_of(matchers).num_words.tolist() == [0, 0, 0]
    assert grammar.worn
    assert all("too many states" in str(matcher.error) for matcher in matchers)


def test_a_step_compiles_for_as_many_as_it_has_time_for() -> None:
    grammar = make_grammar(remaking_s=REMAKING_S)
    matchers = [stand_at(grammar, draw_tokens(seed, 10)) for seed in range(4)]
    use_up(grammar.start())
    masks_of(matchers)
    assert grammar._second is not None
    use_up(grammar._second)
    grammar._compile_s = REMAKING_S  # after the first one there is less left
    masks_of(matchers)
    assert [matcher.error is None for matcher in matchers] == [True, False, False, False]
    assert "too many states" in str(matchers[1].error)
    masks_of(matchers[:1])  # in the next step, the one that is left needs none
    assert matchers[0].error is None


def test_one_that_finds_the_second_set_used_up_goes_on_alone() -> None:
    grammar = make_grammar(remaking_s=REMAKING_S)
    early, late = (stand_at(grammar, draw_tokens(seed, 10)) for seed in range(2))
    use_up(grammar.start())
    masks_of([early])
    assert grammar._second is not None
    use_up(grammar._second)
    late.advance(ord("b"))
    assert masks_of([late]).num_words.sum() > 0
    assert late.error is None


def test_a_token_that_is_not_allowed_is_not_mended() -> None:
    source = write_source(Structure(kind="regex", text="[ab]{3}"), max_bytes=100)
    grammar = CompiledGrammar(make_tokenizer(GrammarLimits()), "regex", source)
    matcher = grammar.matcher()
    matcher.replay([*b"ac"])
    assert str(matcher.error).startswith("regex: after 1 tokens: ")
