"""Which tokens rows may sample, in the shortest form.

M rows, V vocabulary.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 32
# Finding a row's ids costs far more than copying its bits, so ids must save much.
MIN_SAVING = 8

Words = NDArray[np.uint32]


class MaskKind(IntEnum):
    """What the words of a row's mask are; the numbers are those of the wire."""

    ALLOWED = 1  # token ids
    FORBIDDEN = 2  # token ids
    BITS = 3  # bit i of word w is set: token 32 w + i is allowed; ceil(V / 32) words


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """Which tokens M rows may sample. Ids past the vocabulary never, whatever the kind."""

    rows: NDArray[np.int32]  # [M] all different
    kinds: NDArray[np.uint8]  # [M] MaskKind
    num_words: NDArray[np.int32]  # [M]
    words: Words  # [sum(num_words)] bit i of word w of BITS: token 32 * w + i is allowed


@cache
def no_masks() -> TokenMasks:
    return compress(np.zeros((0, 1), np.uint32), vocab_size=WORD_BITS)


def bits_of(token_ids: NDArray[np.int32], vocab_size: int) -> Words:
    """A mask that allows these tokens, as BITS."""
    allowed = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, np.bool_)
    allowed[token_ids] = True
    return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)


def compress(bits: Words, *, vocab_size: int) -> TokenMasks:
    """Takes bits [M, at least ceil(V / 32)], and overwrites those past the vocabulary."""
    bits = bits[:, : -(-vocab_size // WORD_BITS)]
    num_rows, num_words = bits.shape
    if spare := num_words * WORD_BITS - vocab_size:
        bits[:, -1] &= np.uint32(2 ** (WORD_BITS - spare) - 1)
    num_allowed = np.bitwise_count(bits).sum(axis=1, dtype=np.int32)
    num_listed = np.minimum(num_allowed, vocab_size - num_allowed)
    is_listed = num_listed * MIN_SAVING <= num_words
    is_forbidden = is_listed & (num_listed < num_allowed)

    lengths = np.where(is_listed, num_listed, num_words).astype(np.int32)
    words = np.empty(int(lengths.sum()), np.uint32)
    of_list = np.repeat(is_listed, lengths)
    words[of_list] = _list_ids(bits[is_listed], is_forbidden[is_listed], vocab_size)
    words[~of_list] = bits[~is_listed].ravel()
    kinds = np.where(
        is_listed, np.where(is_forbidden, MaskKind.FORBIDDEN, MaskKind.ALLOWED), MaskKind.BITS
    )
    return TokenMasks(
        rows=np.arange(num_rows, dtype=np.int32),
        kinds=kinds.astype(np.uint8),
        num_words=lengths,
        words=words,
    )


def _list_ids(bits: Words, is_forbidden: NDArray[np.bool_], vocab_size: int) -> Words:
    """The ids of each row's set bits, or of its unset ones, row after row."""
    bits = np.where(is_forbidden[:, None], ~bits, bits)
    row, word = np.nonzero(bits)
    single = np.unpackbits(bits[row, word].astype("<u4").view(np.uint8), bitorder="little")
    index, bit = np.nonzero(single.reshape(-1, WORD_BITS))
    ids = word[index] * WORD_BITS + bit
    return ids[ids < vocab_size].astype(np.uint32)
