"""What single tokens stand for: put together, the bytes of the text that they were made from."""

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from runtime.frontend.text import Tokenizer
from tests.tokenizing import BOS, EOS, HARD_TEXTS, LINES, TOKENIZERS, byte_level, byte_tokens

pytestmark = pytest.mark.unit

# Whose text begins with a space that is none of the text's.
PREPENDING = {"sentencepiece", "metaspace"}


def joined(tokenizer: Tokenizer, token_ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, token_ids))


@settings(deadline=None)
@given(text=st.sampled_from(HARD_TEXTS) | st.text(max_size=20))
@example(text=" leading")
@example(text="<0x41> is no byte")
def test_the_bytes_of_a_text_are_those_of_its_tokens(text: str) -> None:
    for name, tokenizer in TOKENIZERS.items():
        space = b" " if text and name in PREPENDING else b""
        read = text.replace("▁", " ")  # SentencePiece's own sign for a space
        plain = name in ("bytes", "byte-level", "straddling")
        if name == "metaspace" and text.startswith((" ", "▁")):  # it prepends none then
            continue
        expected = space + (text if plain else read).encode()
        assert joined(tokenizer, tokenizer.encode(text)) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_byte_has_a_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for byte in range(256):
        (token_id,) = byte_tokens(tokenizer, bytes([byte]))
        assert tokenizer.token_bytes(token_id) == bytes([byte])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_and_unknown_tokens(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert tokenizer.token_bytes(BOS) == b"<s>"
    assert tokenizer.token_bytes(EOS) == b"</s>"
    assert tokenizer.token_bytes(100_000) == b""


def test_a_token_across_two_characters() -> None:
    tokenizer = TOKENIZERS["straddling"]
    pieces = [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode("กกก")]
    assert b"".join(pieces) == "กกก".encode()
    assert b"\x81\xe0\xb8" in pieces


@pytest.mark.parametrize("content", ["<think>", "é", "เ", " two  spaces", "▁"])
@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_of_a_byte_level_tokenizer(content: str, special: bool) -> None:
    tokenizer = byte_level(LINES, vocab_size=400)
    tokenizer._tokenizer.add_tokens([AddedToken(content, special=special, normalized=False)])
    inner = tokenizer._tokenizer
    tokenizer = Tokenizer(inner)
    token_ids = tokenizer.encode(f"a{content}b")
    assert inner.token_to_id(content) in token_ids
    assert joined(tokenizer, token_ids) == f"a{content}b".encode()


def test_added_spaces_of_a_gemma_like_tokenizer() -> None:
    inner = TOKENIZERS["gemma"]._tokenizer
    inner = tokenizers.Tokenizer.from_str(inner.to_str())
    inner.add_tokens([AddedToken("▁▁▁", special=False, normalized=False)])
    tokenizer = Tokenizer(inner)
    token_id = inner.token_to_id("▁▁▁")
    assert tokenizer.token_bytes(token_id) == b"   "


def words(decoder: decoders.Decoder | None) -> Tokenizer:
    vocab = {"<s>": 0, "</s>": 1, "play": 2, "##ing": 3, "games</w>": 4, ".": 5}
    inner = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    if decoder is not None:
        inner.decoder = decoder
    return Tokenizer(inner)


def test_other_decoders_are_read_in_the_middle_of_a_text() -> None:
    wordpiece = words(decoders.WordPiece())
    assert [wordpiece.token_bytes(i) for i in (2, 3)] == [b" play", b"ing"]
    suffixed = words(decoders.BPEDecoder())
    assert [suffixed.token_bytes(i) for i in (2, 4)] == [b"play", b"games "]
    plain = words(None)
    assert joined(plain, [2, 5]).decode().strip() == plain.decode([2, 5]) == "play ."
