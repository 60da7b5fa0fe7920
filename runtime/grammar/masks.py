"""Which tokens may come next."""

from collections.abc import Sequence

import numpy as np

from runtime.grammar.matcher import Matcher
from runtime.scheduling.token_masks import WORD_BITS, TokenMasks, Words, compress, no_masks


def masks_of(matchers: Sequence[Matcher]) -> TokenMasks:
    """One row per matcher, in order; they are of one GrammarTokenizer. Begins a step.

    The interpreter is free meanwhile. A matcher that meets a limit has its `error` set and nothing
    allowed.
    """
    if not matchers:
        return no_masks()
    tokenizer = matchers[0].tokenizer
    tokenizer.remaking.renew()
    num_words = -(-tokenizer.tokenizer.vocab_size // WORD_BITS)
    bits = np.zeros((len(matchers), num_words), np.uint32)
    rows = [row for row, matcher in enumerate(matchers) if matcher.error is None]
    while rows:
        failed = _compute(matchers, rows, bits)
        rows = [row for row in failed if matchers[row].settle()]
    return compress(bits, vocab_size=tokenizer.vocab_size)


def _compute(matchers: Sequence[Matcher], rows: Sequence[int], bits: Words) -> list[int]:
    """Fills rows of `bits`. Returns those whose state has an error; they are cleared."""
    matchers[0].tokenizer.executor.unsafe_compute_mask_ptr(
        [(matchers[row].state, row) for row in rows],
        bits.ctypes.data,
        bits.strides[0],
        len(matchers),
    )
    failed = [row for row in rows if matchers[row].state.is_error()]
    bits[failed] = 0
    return failed
