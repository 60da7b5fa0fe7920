"""Where a text's tokens begin in it."""

import pytest

from runtime.frontend.openai.logprobs import OffsetCounter, TokenNames
from runtime.frontend.text import Tokenizer
from tests.tokenizing import TOKENIZERS

pytestmark = pytest.mark.unit

TEXTS = ("two words", " two  words", "The quick brown fox", "x")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=list(TOKENIZERS))
def test_offsets_are_those_of_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    offsets = OffsetCounter(TokenNames(tokenizer), skips_special=True, begins_text=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = [offsets.next(each) for each in ids]
    assert found == [len(tokenizer.decode(ids[:end])) for end in range(len(ids))]


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=list(TOKENIZERS))
def test_a_text_that_goes_on_keeps_its_first_space(tokenizer: Tokenizer) -> None:
    before = tokenizer.encode("The", add_special_tokens=False)
    ids = tokenizer.encode("The quick fox", add_special_tokens=False)
    assert ids[: len(before)] == before
    offsets = OffsetCounter(TokenNames(tokenizer), skips_special=True, begins_text=False)
    found = [offsets.next(each) for each in ids[len(before) :]]
    ends = range(len(before), len(ids))
    assert found == [len(tokenizer.decode(ids[:end])) - len("The") for end in ends]
