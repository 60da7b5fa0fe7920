"""The bytes that single tokens stand for."""

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

# How SentencePiece's byte fallback spells a byte.
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# A token is decoded between two of these, as some decoders treat a text's ends in their own way.
ANCHOR = "a"


class TokenBytes:
    """Reads single tokens by the rules of their tokenizer's decoder."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.decoder
        kinds = set() if self._decoder is None else set(_kinds(self._decoder.__getstate__()))
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_fallback = "ByteFallback" in kinds
        added = tokenizer.get_added_tokens_decoder()
        # A byte-level decoder leaves added tokens as they are, or reads "é" as a byte, wrongly.
        self._verbatim = frozenset(
            token_id for token_id, token in added.items() if token.special or self._is_byte_level
        )

    def of(self, token_id: int) -> bytes:
        """The bytes of the token; none where the tokenizer doesn't know the id."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._verbatim:
            return token.encode()
        if self._is_byte_level:
            return _read_byte_level(token)
        if self._has_byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return self._between_anchors(token).encode()

    def _between_anchors(self, token: str) -> str:
        if self._decoder is None:
            return f" {token}"  # as tokenizers' decode puts tokens together then
        before = self._decoder.decode([ANCHOR])
        after = self._decoder.decode([ANCHOR, ANCHOR]).removeprefix(before)
        return str(
            self._decoder.decode([ANCHOR, token, ANCHOR]).removeprefix(before).removesuffix(after)
        )


def _kinds(state: bytes) -> Iterator[str]:
    """The types of a decoder and of those that it is made of."""

    def walk(decoder: dict[str, Any]) -> Iterator[str]:
        yield decoder["type"]
        for part in decoder.get("decoders", ()):
            yield from walk(part)

    return walk(json.loads(state))


def _byte_chars() -> dict[str, int]:
    """Bytes by the characters that byte-level tokenizers spell them with.

    A printable byte is its own Latin-1 character; the others are U+0100 and up, in their order
    (the table of GPT-2, which all of them share).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    chars = {chr(byte): byte for byte in printable}
    return chars | {chr(0x100 + place): byte for place, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_chars()


def _read_byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()
