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
    them. All but `timeout_s` count work and no time, so a busy machine refuses no more than an
    idle one.
    """

    max_source_bytes: int = 64 * 1024
    timeout_s: float = 2.0  # of trying a structure in the helper process
    max_memory_bytes: int = 2**30  # address space of the helper process
    max_pending: int = 256  # requests that wait for compilation; more are refused
    max_cached: int = 64  # compiled structures kept for the next request

    max_grammar_size: int = 500_000  # symbols in all productions
    initial_lexer_fuel: int = 1_000_000  # at most half a second of compiling
    max_lexer_states: int = 32_768  # of all matchers of one structure, about 1 kB each

    step_lexer_fuel: int = 50_000  # new states for one mask; up to 5 ms
    step_max_items: int = 10_000  # readings tried for one mask; up to 5 ms
    max_items_in_row: int = 1_000  # ways to read one place; an optional property takes four
    # The same of an EBNF grammar, which may be ambiguous: a step costs their square, up to 5 ms.
    max_items_in_grammar_row: int = 300


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
