"""Between text and token ids, by the model's own tokenizer.json. Knows no torch, no transformers.

Output text is cut at characters, never inside one, so it can be shown as it comes.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import tokenizers

from runtime.errors import ConfigError, InvalidRequestError
from runtime.frontend.token_bytes import TokenBytes

# What a tokenizer writes for bytes that are no character, or not yet one.
REPLACEMENT = "\ufffd"
# A character has at most 4 bytes and a token at least one: after so many tokens that bring nothing
# readable, no character is being built, and what they read as is given out.
MAX_HELD_TOKENS = 16
# Prompt tokens that a request's output is decoded after: the leading space of a token depends on
# what stands before it.
NUM_CONTEXT_TOKENS = 8
MAX_OPEN_TOKENS = 3


class Tokenizer:
    """A model's tokenizer. May be used on any thread."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # What a training script left in the file; a prompt is neither cut nor filled up.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._ids_with: dict[tuple[str, ...], frozenset[int]] = {}

    @classmethod
    def load(cls, folder: str) -> Self | None:
        """Reads tokenizer.json; None where the folder has none.

        Raises ConfigError: the file can't be read as one.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library has no narrower class
            raise ConfigError(f"{path} is no tokenizer: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; those that begin or end every text are added on request.

        The text of a special token is that token either way. A rendered chat has all that it needs:
        its template wrote the token that begins a text.
        Raises InvalidRequestError: a lone surrogate, which no UTF-8 has.
        """
        try:
            # The batch call lets other threads run, `encode` doesn't: 2 MB take 2 seconds.
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except TypeError as error:
            raise InvalidRequestError(
                f"prompt is no valid text: {_describe_surrogate(text)}"
            ) from error
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, each at least 0, without ids that it doesn't know."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def has_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether `decode` looks at the token at all."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self._tokenizer.id_to_token(token_id) is not None

    def special_ids_with(self, marks: tuple[str, ...]) -> frozenset[int]:
        """Special tokens that one of `marks` is in."""
        if marks not in self._ids_with:
            self._ids_with[marks] = frozenset(
                token_id
                for token_id in self._special_ids
                if any(mark in (self._tokenizer.id_to_token(token_id) or "") for mark in marks)
            )
        return self._ids_with[marks]

    def token_bytes(self, token_id: int) -> bytes:
        """What the token, at least 0, adds in the middle of a text: maybe a part of a character.

        A special token's are its content, an unknown id has none. Those of a text's tokens, put
        together, are the text in UTF-8, but for what the tokenizer itself changes: SentencePiece
        writes a space before the first word, some normalize.
        """
        return self._bytes.of(token_id)


class Detokenizer:
    """Turns one request's output into text, token by token.

    What `push` and `finish` return, put together, is the decoded prompt and output without the
    decoded prompt, for every cut of the output into pushes. Two exceptions, both for bytes that
    are no UTF-8. A run of tokens of single bytes reads as replacement characters as a whole if one
    of them is wrong: what was given out before the wrong one stays, and the text goes on with the
    rest decoded by itself. And the incomplete character at the end of a prompt is given out as the
    character that the output completes, or not at all.

    tokenizers' DecodeStream holds back text as long as each token ends inside a character, gives
    out the prompt where that does, and raises a bare Exception in the first case above.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        kept_special_ids: Collection[int] = (),
    ) -> None:
        """`kept_special_ids` have a text even where special tokens are skipped."""
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._kept_ids = kept_special_ids
        # What is skipped never gets as far as that.
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._window = self._context(prompt_token_ids)  # given out, then held
        self._num_held = 0
        self._sent = self._decode(self._window)  # of the window's text, what was given out
        self._prompt_rest = ""  # how the prompt's incomplete character reads while it is open
        if self._sent.endswith(REPLACEMENT):
            self._hold_open_character()

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that became certain with `token_ids`; "" while a character is incomplete."""
        return "".join(map(self._push, token_ids))

    def finish(self) -> str:
        """What was held back; a character that stays incomplete is a replacement character."""
        text = self._decode(self._window)
        if not text.startswith(self._sent):
            text = self._restart()
        return self._without_prompt(text[len(self._sent) :])

    def _has_text(self, token_id: int) -> bool:
        skips = self._skips_special and token_id not in self._kept_ids
        return self._tokenizer.has_text(token_id, skip_special_tokens=skips)

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens that have text, from the start of a character on."""
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if self._has_text(token_id):
                tail.insert(0, token_id)
            if len(tail) == NUM_CONTEXT_TOKENS + MAX_OPEN_TOKENS:
                break
        for start in range(max(0, len(tail) - NUM_CONTEXT_TOKENS), -1, -1):
            if not self._decode(tail[start:]).startswith(REPLACEMENT):
                return tail[start:]
        return tail[-NUM_CONTEXT_TOKENS:]

    def _push(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        self._num_held += 1
        overdue = self._num_held >= MAX_HELD_TOKENS
        text = self._decode(self._window)
        if not text.startswith(self._sent):
            if text.endswith(REPLACEMENT) and not overdue:
                return ""
            text = self._restart()
        certain = text.rstrip(REPLACEMENT)
        if overdue and len(certain) < len(text):
            certain = text[:-1]  # the last one may still become a character
        if len(certain) <= len(self._sent) and not overdue:
            return ""
        delta = certain[len(self._sent) :]
        self._advance(num_open=len(text) - len(certain))
        return self._without_prompt(delta)

    def _advance(self, *, num_open: int) -> None:
        """Keeps the held tokens as context, all but `num_open` characters of them given out."""
        self._window = self._window[-self._num_held :]
        self._num_held = 0
        text = self._decode(self._window)
        self._sent = text[: len(text) - num_open]

    def _restart(self) -> str:
        self._window = self._window[len(self._window) - self._num_held :]
        self._sent = ""
        return self._decode(self._window)

    def _hold_open_character(self) -> None:
        window, text = self._window, self._sent
        for num_open in range(1, min(MAX_OPEN_TOKENS, len(window)) + 1):
            closed = self._decode(window[:-num_open])
            if closed.endswith(REPLACEMENT):
                continue
            self._num_held = num_open
            self._sent = text.rstrip(REPLACEMENT)
            self._prompt_rest = text[len(self._sent) :]
            if len(closed) > len(self._sent):  # a run of byte tokens reads as broken as a whole
                self._sent = closed
                self._prompt_rest = self._decode(window[-num_open:])
            return

    def _without_prompt(self, delta: str) -> str:
        if delta and self._prompt_rest:
            delta = delta.removeprefix(self._prompt_rest)
            self._prompt_rest = ""
        return delta


def _describe_surrogate(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start} is a lone surrogate, U+{ord(text[error.start]):04X}"
    return f"got {type(text).__name__}"
