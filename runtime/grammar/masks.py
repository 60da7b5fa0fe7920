"""Which tokens may come next."""

from collections.abc import Sequence

import numpy as np

from runtime.grammar.matcher import Matcher
from runtime.scheduling.token_masks import WORD_BITS, TokenMasks, Words, compress, no_masks


def masks_of(matchers: Sequence[Matcher]) -> TokenMasks:
    """One row per matcher, in order; they are of one GrammarTokenizer.

    The interpreter is free meanwhile. A matcher that meets a limit has its `error` set and nothing
    allowed.
    """
    if not matchers:
        return no_masks()
    tokenizer = matchers[0].tokenizer
    num_words = -(-tokenizer.tokenizer.vocab_size // WORD_BITS)
    bits = np.zeros((len(matchers), num_words), np.uint32)
    states = [(m.state, row) for row, m in enumerate(matchers) if m.error is None]
    if states:
        tokenizer.executor.unsafe_compute_mask_ptr(
            states, bits.ctypes.data, bits.strides[0], len(matchers)
        )
    for row, matcher in enumerate(matchers):
        if matcher.error is None and matcher.state.is_error():
            bits[row] = 0
            _compute_again(matcher, bits[row])
    return compress(bits, vocab_size=tokenizer.vocab_size)


def _compute_again(matcher: Matcher, bits: Words) -> None:
    if not matcher.settle():
        return
    matcher.state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    if matcher.state.is_error():
        bits[:] = 0
        matcher.settle()
