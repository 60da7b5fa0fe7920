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

MAX_SETS = 3  # of states that one sequence may stand in; the last is its own
# What a sequence leaves behind for those that share its states. The last is how the others look
# where a token is taken; a token that isn't allowed looks the same.
_SHARED_CAUSES = ("too many states", "too many expressions", "fails parse")


class CompiledGrammar:
    """A structure that was compiled; its matchers share what they learn of it.

    What they learn are states of its terminals, of which there is a limit. Once one sequence runs
    into it, or into the limit of a step, the library lets none of the others go on. The grammar is
    then worn: compile it anew for the next request. Those that stand in it go on with a second set
    of states, and once that is used up with one of their own each, as many as the time for it in a
    step suffices for. The rest end with the error.
    """

    def __init__(self, tokenizer: GrammarTokenizer, kind: StructureKind, source: str) -> None:
        """Raises InvalidRequestError: as GrammarTokenizer.compile."""
        started_s = time.thread_time()
        self.tokenizer = tokenizer
        self.kind = kind
        self.worn = False
        self._source = source
        self._start = tokenizer.compile(source, kind)
        self._second: LLMatcher | None = None
        self._compile_s = time.thread_time() - started_s

    def check_first_mask(self) -> None:
        """Raises InvalidRequestError: it takes more than the limits of a step allow."""
        state = self.start()
        state.compute_bitmask()
        if state.is_error():
            raise InvalidRequestError(shorten(state.get_error()))

    def matcher(self) -> "Matcher":
        """At the start of the output; takes microseconds."""
        return Matcher(self)

    def start(self) -> "LLMatcher":
        return self._start.deep_copy()

    def start_again(self, token_ids: Sequence[int], *, alone: bool) -> "LLMatcher | None":
        """A state after these tokens in the second set of states, or in one of its own.

        None where the tokens aren't allowed, or it takes more than is left of the step's time.
        """
        remaking = self.tokenizer.remaking
        must_compile = alone or self._second is None
        if not remaking.suffices_for(self._compile_s if must_compile else 0):
            return None
        with remaking:
            state = self._compile_again() if alone else self._start_second()
            took_all = all(state.consume_token(i) and remaking.suffices_for(0) for i in token_ids)
        return state if took_all else None

    def _start_second(self) -> "LLMatcher":
        if self._second is None:
            self._second = self._compile_again()
        return self._second.deep_copy()

    def _compile_again(self) -> "LLMatcher":
        return self.tokenizer.compile(self._source, self.kind)


class Matcher:
    """Follows the output of one sequence. Used by one thread at a time.

    `error` is set once a limit was met or a token came that wasn't allowed, and stays; from then
    on nothing is allowed.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.error: InvalidRequestError | None = None
        self._grammar = grammar
        self._state = grammar.start()
        self._num_sets = 1  # of states, that it has stood in
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

    @property
    def num_tokens(self) -> int:
        """That it has taken."""
        return len(self._token_ids)

    def follow(self, token_ids: Sequence[int]) -> None:
        """As `replay`, up to a token that can't be taken, which `replay` is to settle.

        May be on another thread than that of the others that share its states.
        """
        for token_id in token_ids:
            if not self._state.consume_token(token_id):
                return
            self._token_ids.append(token_id)

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

    def settle(self, token_ids: Sequence[int] = ()) -> bool:
        """After an error of `state`: whether it was another sequence's doing and is mended.

        The tokens are those that it came at, after what was taken before.
        """
        cause = self._state.get_error()
        if any(part in cause for part in _SHARED_CAUSES) and self._num_sets < MAX_SETS:
            self._grammar.worn = True
            tokens = [*self._token_ids, *token_ids]
            # The second set may be used up as well, or be once it has taken the tokens.
            for num_sets in range(self._num_sets + 1, MAX_SETS + 1):
                again = self._grammar.start_again(tokens, alone=num_sets == MAX_SETS)
                if again is not None:
                    self._state, self._token_ids, self._num_sets = again, tokens, num_sets
                    return True
        self.error = InvalidRequestError(
            f"{self._grammar.kind}: after {len(self._token_ids)} tokens: {shorten(cause)}"
        )
        return False
