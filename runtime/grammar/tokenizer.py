"""The vocabulary as llguidance holds it, and its compiler."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.errors import InvalidRequestError
from runtime.grammar.limits import GrammarLimits, parser_limits
from runtime.grammar.message import shorten
from runtime.grammar.remaking import RemakingTime
from runtime.grammar.vocabulary import Vocabulary
from runtime.structure import StructureKind

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_MASK_THREADS = 8


class _Words:
    """What LLTokenizer asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes | str) -> list[int]:
        """Asked for forced text alone, and our grammars force none."""
        return []


class GrammarTokenizer:
    """`vocab_size` is the model's, `tokenizer` may have one id more. Only `remaking` changes."""

    def __init__(
        self, vocabulary: Vocabulary, *, eos_token_ids: Sequence[int], limits: GrammarLimits
    ) -> None:
        """Holds the interpreter for half a second at 262,144 tokens."""
        from llguidance import LLExecutor, LLTokenizer

        self.vocab_size = len(vocabulary.token_bytes)
        tokens = vocabulary.token_bytes
        eos = [token_id for token_id in eos_token_ids if token_id < self.vocab_size]
        if not eos:  # llguidance needs one; this one is past the model's ids
            eos = [self.vocab_size]
            tokens = [*tokens, b""]
        special = {i for i in vocabulary.special_ids if i < self.vocab_size} | set(eos)
        words = _Words(tokens, sorted(special), eos[0])
        self.tokenizer: LLTokenizer = LLTokenizer(words, eos_token=eos)  # type: ignore[arg-type]
        threads = min(MAX_MASK_THREADS, max(1, (os.cpu_count() or 1) - 1))
        self.executor: LLExecutor = LLExecutor(threads)
        self.remaking = RemakingTime(limits.remaking_s)
        self._limits = limits

    def compile(self, source: str, kind: StructureKind) -> "LLMatcher":
        """A matcher at its start; the interpreter is free meanwhile.

        Raises InvalidRequestError: the grammar is wrong, or past a limit.
        """
        from llguidance import LLMatcher

        limits = parser_limits(self._limits, kind)
        matcher = LLMatcher(self.tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequestError(shorten(matcher.get_error()))
        return matcher
