"""Masks as columns: ids where they are few, bits else."""

import random

import numpy as np
import pytest

from runtime.grammar.limits import GrammarLimits
from runtime.grammar.masks import masks_of
from runtime.grammar.matcher import CompiledGrammar, Matcher
from runtime.grammar.source import write_source
from runtime.grammar.tokenizer import GrammarTokenizer
from runtime.grammar.vocabulary import Vocabulary
from runtime.scheduling.token_masks import MIN_SAVING, WORD_BITS, MaskKind, TokenMasks, compress
from runtime.structure import Structure

pytestmark = pytest.mark.unit

EOS = 0


def pack(rows: list[set[int]], vocab_size: int) -> np.ndarray:
    bits = np.zeros((len(rows), -(-vocab_size // WORD_BITS)), np.uint32)
    for row, allowed in enumerate(rows):
        for token_id in allowed:
            bits[row, token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
    return bits


def unpack(masks: TokenMasks, vocab_size: int) -> list[set[int]]:
    """As a worker reads them."""
    everything = {*range(vocab_size)}
    starts = np.cumsum(masks.num_words) - masks.num_words
    rows = []
    for kind, start, length in zip(masks.kinds, starts, masks.num_words, strict=True):
        words = masks.words[start : start + length].tolist()
        if kind == MaskKind.BITS:
            assert length == -(-vocab_size // WORD_BITS)
            rows.append({i for i in everything if words[i // WORD_BITS] >> i % WORD_BITS & 1})
        else:
            assert words == sorted(words)
            rows.append(everything - {*words} if kind == MaskKind.FORBIDDEN else {*words})
    return rows


@pytest.mark.parametrize("vocab_size", [1024, 1023, 993, 992, 40, 5])
def test_what_is_unpacked_is_what_was_packed(vocab_size):
    draw = random.Random(vocab_size)
    everything = {*range(vocab_size)}
    rows: list[set[int]] = [set(), everything]
    for count in (1, 2, 3, 4, 5, vocab_size // 2):
        some = {*draw.sample(range(vocab_size), count)}
        rows += [some, everything - some]
    draw.shuffle(rows)
    masks = compress(pack(rows, vocab_size), vocab_size=vocab_size)
    assert unpack(masks, vocab_size) == rows
    assert masks.rows.tolist() == [*range(len(rows))]
    assert masks.num_words.sum() == len(masks.words)


def test_few_ids_are_listed_and_many_are_bits():
    vocab_size = 32 * 1024
    few = 1024 // MIN_SAVING
    everything = {*range(vocab_size)}
    some, more = {*range(7, 7 + few)}, {*range(7, 8 + few)}
    rows = [some, everything - some, more, everything - more, set()]
    masks = compress(pack(rows, vocab_size), vocab_size=vocab_size)
    assert masks.kinds.tolist() == [
        MaskKind.ALLOWED,
        MaskKind.FORBIDDEN,
        MaskKind.BITS,
        MaskKind.BITS,
        MaskKind.ALLOWED,
    ]
    assert masks.num_words.tolist() == [few, few, 1024, 1024, 0]


def test_ids_past_the_vocabulary_are_never_allowed():
    bits = np.full((2, 3), 0xFFFFFFFF, np.uint32)
    masks = compress(bits, vocab_size=37)
    assert unpack(masks, 37) == [{*range(37)}] * 2
    assert masks.kinds.tolist() == [MaskKind.FORBIDDEN] * 2
    assert masks.num_words.tolist() == [0, 0]


@pytest.fixture(scope="module")
def tokenizer() -> GrammarTokenizer:
    """ASCII, and all three-letter words of 16 letters: big enough for every kind to come."""
    letters = "abcdefghijklmnop"
    words = [a + b + c for a in letters for b in letters for c in letters]
    token_bytes = [b"", *(bytes([byte]) for byte in range(128)), *map(str.encode, words), b""]
    vocabulary = Vocabulary(token_bytes=token_bytes, special_ids=frozenset({EOS}))
    return GrammarTokenizer(vocabulary, eos_token_ids=[EOS], limits=GrammarLimits())


@pytest.mark.parametrize(
    ("regex", "kind"),
    [
        ("a[0-9]", MaskKind.ALLOWED),
        ("[a-h].*", MaskKind.BITS),
        (r"(?s)(x|[\x00-\x7f])*", MaskKind.FORBIDDEN),
    ],
)
def test_each_kind_is_what_advancing_says(tokenizer, regex, kind):
    source = write_source(Structure(kind="regex", text=regex), max_bytes=1000)
    matcher = Matcher(CompiledGrammar(tokenizer, "regex", source))
    masks = masks_of([matcher])
    assert masks.kinds.tolist() == [kind]
    takes = {i for i in range(tokenizer.vocab_size) if matcher.state.deep_copy().consume_token(i)}
    assert unpack(masks, tokenizer.vocab_size) == [takes]
