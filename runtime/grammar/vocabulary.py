"""What each token id adds to the output's text, as bytes, read from tokenizer.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError

SPACE_MARK = "▁"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """`token_bytes` has the model's size: b"" for special ids, and for padding."""

    token_bytes: list[bytes]
    special_ids: frozenset[int]

    @classmethod
    def read(cls, folder: str, *, vocab_size: int) -> "Vocabulary":
        """Raises ConfigError: no tokenizer.json, or one whose bytes can't be told."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError("the model has no tokenizer.json, which structured output needs")
        try:
            return cls.of(json.loads(path.read_bytes()), vocab_size=vocab_size)
        except (ValueError, KeyError, TypeError) as error:
            # Clients read it, who needn't know where the file is.
            raise ConfigError(f"the model's tokenizer.json is no tokenizer: {error!r}") from error

    @classmethod
    def of(cls, tokenizer: dict[str, Any], *, vocab_size: int) -> "Vocabulary":
        """From the contents of tokenizer.json; those of a BPE or WordPiece model have a dict."""
        spelling = _Spelling(_decoders(tokenizer["decoder"]))
        vocab = tokenizer["model"]["vocab"]
        ids = vocab if isinstance(vocab, dict) else {v[0]: i for i, v in enumerate(vocab)}
        added = tokenizer["added_tokens"]
        ids |= {token["content"]: token["id"] for token in added}
        special = frozenset(token["id"] for token in added if token["special"])
        token_bytes = [b""] * vocab_size
        for token, token_id in ids.items():
            if token_id < vocab_size and token_id not in special:
                token_bytes[token_id] = spelling.bytes_of(token)
        return cls(token_bytes=token_bytes, special_ids=special)


class _Spelling:
    """How a tokenizer's decoder reads a token that isn't the first of a text."""

    def __init__(self, decoders: list[dict[str, Any]]) -> None:
        kinds = {decoder["type"] for decoder in decoders}
        if unknown := kinds - {
            "ByteLevel",
            "ByteFallback",
            "Metaspace",
            "Replace",
            "Fuse",
            "Strip",
        }:
            raise ConfigError(
                f"structured output needs a tokenizer of bytes; this one's decoder has "
                f"{', '.join(sorted(unknown))}"
            )
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._replacements = [
            (decoder["pattern"]["String"], decoder["content"])
            for decoder in decoders
            if decoder["type"] == "Replace" and "String" in decoder["pattern"]
        ]
        self._replacements += [
            (decoder.get("replacement", SPACE_MARK), " ")
            for decoder in decoders
            if decoder["type"] == "Metaspace"
        ]

    def bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token, which stands for itself
                return token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _decoders(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise ConfigError("structured output needs a tokenizer of bytes; this one has no decoder")
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
