"""A list of token ids as a mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.scheduling.token_masks import MaskKind, bits_of, compress, no_masks
from tests.masks import allowed_by

pytestmark = pytest.mark.unit


@given(st.integers(1, 200), st.data())
def test_bits_allow_the_tokens_alone(vocab_size: int, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, vocab_size - 1)))  # some twice
    bits = bits_of(np.array(token_ids, np.int32), vocab_size)
    assert bits.dtype == np.uint32
    assert len(bits) == -(-vocab_size // 32)
    masks = compress(bits[None], vocab_size=vocab_size)
    assert allowed_by(masks, vocab_size) == {0: {*token_ids}}


def test_a_short_list_in_a_large_vocabulary_is_sent_as_a_list() -> None:
    masks = compress(bits_of(np.array([262_143, 5], np.int32), 262_144)[None], vocab_size=262_144)
    assert masks.kinds.tolist() == [MaskKind.ALLOWED]
    assert masks.words.tolist() == [5, 262_143]


def test_no_masks_have_no_rows() -> None:
    masks = no_masks()
    assert [len(each) for each in (masks.rows, masks.kinds, masks.num_words, masks.words)] == [
        0,
        0,
        0,
        0,
    ]
