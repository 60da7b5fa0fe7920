"""Where one sequence stands in its structure."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.errors import InvalidRequestError
from runtime.grammar.message import shorten
from runtime.grammar.tokenizer import GrammarTokenizer
from runtime.structure import StructureKind

if TYPE_CHECKING:
    from llguidance import LLMatcher

# How long compiling again, and taking the tokens again, may hold the engine's thread.
MAX_AGAIN_S = 0.02
# What a sequence leaves behind for those that share its states. The last is how the others look
# where a token is taken; a token that isn't allowed looks the same.
_SHARED_CAUSES = ("too many states", "too many expressions", "fails parse")


class CompiledGrammar:
    """A structure that was compiled; its matchers share what they learn of it.

    What they learn are states of its terminals, of which there is a limit. Once one sequence runs
    into it, or into the limit of a step, the library lets none of the others go on. Each of them
    then gets a copy of its own, and the grammar is worn: compile it anew for the next request.
    """

    def __init__(self, tokenizer: GrammarTokenizer, kind: StructureKind, source: str) -> None:
        """Raises InvalidRequestError: as GrammarTokenizer.compile."""
        started = time.perf_counter()
        self.tokenizer = tokenizer
        self.kind = kind
        self.worn = False
        self._source = source
        self._start = tokenizer.compile(source, kind)
        self._is_quick = time.perf_counter() - started <= MAX_AGAIN_S

    def matcher(self) -> "Matcher":
        """At the start of the output; takes microseconds."""
        return Matcher(self)

    def start(self) -> "LLMatcher":
        return self._start.deep_copy()

    def start_alone(self) -> "LLMatcher | None":
        """As `start`, sharing nothing; None where it would take too long."""
        return self.tokenizer.compile(self._source, self.kind) if self._is_quick else None


class Matcher:
    """Follows the output of one sequence. Used by one thread at a time.

    `error` is set once a limit was met or a token came that wasn't allowed, and stays; from then
    on nothing is allowed.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.error: InvalidRequestError | None = None
        self._grammar = grammar
        self._state = grammar.start()
        self._is_alone = False
        self._token_ids: list[int] = []

    @property
    def tokenizer(self) -> GrammarTokenizer:
        return self._grammar.tokenizer

    @property
    def state(self) -> "LLMatcher":
        """For masks."""
        return self._state

    @property
    def is_finished(self) -> bool:
        """Whether the output can't go on: it is complete, or its end-of-sequence token came.

        An output that is complete but may go on (`a+` after an `a`) isn't finished.
        """
        return self.error is None and self._state.is_stopped()

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return self.error is None and self._state.is_accepting()

    def advance(self, token_id: int) -> None:
        """Takes the next token. Where it can't, `error` is set."""
        if self.error is not None:
            return
        # One by one: in a list the library takes no token after the end, not even the end again.
        if self._state.consume_token(token_id):
            self._token_ids.append(token_id)
        else:
            self.settle((token_id,))

    def replay(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that were sampled before, as a sequence that is resumed has them."""
        for token_id in token_ids:
            self.advance(token_id)

    def fork(self) -> "Matcher":
        """A matcher that stands where this one does."""
        other = Matcher(self._grammar)
        other.error, other._is_alone = self.error, self._is_alone
        other._state = self._state.deep_copy()
        other._token_ids = self._token_ids.copy()
        return other

    def settle(self, token_ids: Sequence[int] = ()) -> bool:
        """After an error of `state`: whether it was another sequence's doing and is mended.

        The tokens are those that it came at, after what was taken before.
        """
        cause = self._state.get_error()
        if not self._is_alone and any(part in cause for part in _SHARED_CAUSES):
            tokens = [*self._token_ids, *token_ids]
            again = self._grammar.start_alone()
            if again is not None and _take_quickly(again, tokens):
                self._state, self._token_ids, self._is_alone = again, tokens, True
                self._grammar.worn = True
                return True
        self.error = InvalidRequestError(
            f"{self._grammar.kind}: after {len(self._token_ids)} tokens: {shorten(cause)}"
        )
        return False


def _take_quickly(state: "LLMatcher", token_ids: Sequence[int]) -> bool:
    deadline = time.perf_counter() + MAX_AGAIN_S
    return all(state.consume_token(i) and time.perf_counter() < deadline for i in token_ids)
