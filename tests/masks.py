"""For tests of token masks: what they allow, found one token at a time."""

import numpy as np

from runtime.scheduling.token_masks import WORD_BITS, MaskKind, TokenMasks


def allowed_by(masks: TokenMasks, vocab_size: int) -> dict[int, set[int]]:
    """The tokens that each row may sample."""
    everything = {*range(vocab_size)}
    ends = np.cumsum(masks.num_words)
    allowed: dict[int, set[int]] = {}
    for row, kind, end, count in zip(
        masks.rows.tolist(), masks.kinds, ends, masks.num_words, strict=True
    ):
        words = masks.words[end - count : end].tolist()
        assert row not in allowed, "a row has two masks"
        match kind:
            case MaskKind.ALLOWED:
                allowed[row] = {*words}
            case MaskKind.FORBIDDEN:
                allowed[row] = everything - {*words}
            case _:
                bits = {i for i in everything if words[i // WORD_BITS] >> i % WORD_BITS & 1}
                allowed[row] = bits
    return allowed
