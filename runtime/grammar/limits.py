"""How much one structure may cost."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.structure import StructureKind

if TYPE_CHECKING:
    from llguidance import LLParserLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """The times are of one core at 262,144 token ids, measured with the embedded model.

    Limits while compiling refuse the request; limits of a step end the request that runs into
    them. `timeout_s` goes by the clock, `remaking_s` by the CPU time of the thread, and all others
    count work, so that but for `timeout_s` a busy machine refuses no more than an idle one.
    """

    max_source_bytes: int = 64 * 1024
    timeout_s: float = 1.0  # of trying a structure in the helper process; the worst take 0.35 s
    max_memory_bytes: int = 2**30  # address space of the helper process
    max_pending: int = 256  # structures that wait for compilation; more are refused
    max_cached: int = 64  # compiled structures kept for the next request

    max_grammar_size: int = 500_000  # symbols in all productions
    initial_lexer_fuel: int = 1_000_000  # at most half a second of compiling
    max_lexer_states: int = 32_768  # of all matchers of one structure, about 1 kB each

    # A mask takes 0.5 ms or less for the schemas that were tried, with up to 1,200 words in an enum
    # and 200 optional properties. Regular expressions of Unicode's words take up to 5 ms at first,
    # and then 2 ms for the walk over all tokens, which no limit counts.
    step_lexer_fuel: int = 15_000  # new states for one mask, 1.8 ms; 5,000 are too few for words
    step_max_items: int = 10_000  # readings tried for one mask, 2.5 ms; 7,000: too few for SQL
    max_items_in_row: int = 1_000  # ways to read one place; an optional property takes four
    # The same of an EBNF grammar, which may be ambiguous: a mask costs their square, 0.8 ms here.
    max_items_in_grammar_row: int = 150
    # A step's time to give sequences other states: 1 ms to compile, and 2 us a token, or more.
    remaking_s: float = 0.02


def parser_limits(limits: GrammarLimits, kind: StructureKind) -> "LLParserLimits":
    from llguidance import LLParserLimits

    max_items = limits.max_items_in_row
    if kind == "grammar":
        max_items = limits.max_items_in_grammar_row
    return LLParserLimits(
        max_items_in_row=max_items,
        initial_lexer_fuel=limits.initial_lexer_fuel,
        step_lexer_fuel=limits.step_lexer_fuel,
        step_max_items=limits.step_max_items,
        max_lexer_states=limits.max_lexer_states,
        max_grammar_size=limits.max_grammar_size,
        verbose_errors=False,
    )
