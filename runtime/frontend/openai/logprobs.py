"""Log probabilities in OpenAI's two shapes."""

import codecs
from collections.abc import Iterable

from runtime.frontend.openai import answers
from runtime.frontend.text import Tokenizer
from runtime.request import TokenLogprobs

# A token, and None where it follows on nothing.
Entry = tuple[int, TokenLogprobs | None]


class TokenNames:
    """Texts that stand for tokens; ids where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def first_bytes_of(self, token_id: int) -> bytes:
        """At the beginning of a text, where a space that SentencePiece wrote isn't read as one."""
        data = self.bytes_of(token_id)
        if self._tokenizer is None or not data.startswith(b" "):
            return data
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return data if text.startswith(" ") else data[1:]

    def name(self, token_id: int) -> str:
        """The token's text; its bytes where they are no whole characters."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def is_shown(self, token_id: int, *, skips_special: bool) -> bool:
        """Whether texts have the token."""
        return self._tokenizer is not None and self._tokenizer.has_text(
            token_id, skip_special_tokens=skips_special
        )

    def tops(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens, best first, and the token that is there."""
        found: dict[str, float] = {}
        for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
            found.setdefault(self.name(top_id), logprob)
        found.setdefault(self.name(token_id), entry.logprob)
        return found


class OffsetCounter:
    """Where in a text its tokens begin, in characters."""

    def __init__(self, names: TokenNames, *, skips_special: bool, begins_text: bool) -> None:
        """`begins_text`: nothing that is shown stands before the first token."""
        self._names = names
        self._begins_text = begins_text
        self._skips_special = skips_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, token_id: int) -> int:
        """The next token's place; of one inside a character, that of the character."""
        offset = self._offset
        if self._names.is_shown(token_id, skips_special=self._skips_special):
            names = self._names
            bytes_of = names.first_bytes_of if self._begins_text else names.bytes_of
            self._begins_text = False
            self._offset += len(self._decoder.decode(bytes_of(token_id)))
        return offset


def completion_logprobs(
    entries: Iterable[Entry], names: TokenNames, offsets: OffsetCounter
) -> answers.CompletionLogprobs:
    """The shape of /v1/completions; `offsets` goes on over the entries."""
    shape: answers.CompletionLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token_id, entry in entries:
        shape["tokens"].append(names.name(token_id))
        shape["token_logprobs"].append(None if entry is None else entry.logprob)
        shape["top_logprobs"].append(None if entry is None else names.tops(token_id, entry))
        shape["text_offset"].append(offsets.next(token_id))
    return shape


def chat_logprobs(
    entries: Iterable[tuple[int, TokenLogprobs]], names: TokenNames
) -> answers.ChatLogprobs:
    """The shape of /v1/chat/completions."""
    content: list[answers.TokenLogprob] = [
        {
            **_top(token_id, entry.logprob, names),
            "top_logprobs": [
                _top(top_id, logprob, names)
                for top_id, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            ],
        }
        for token_id, entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Iterable[Entry], names: TokenNames) -> answers.PromptLogprobs:
    """The shape that vLLM has for both."""
    return [
        None if entry is None else _by_id(token_id, entry, names) for token_id, entry in entries
    ]


def _by_id(
    token_id: int, entry: TokenLogprobs, names: TokenNames
) -> dict[str, answers.PromptToken]:
    tokens = zip(
        (token_id, *entry.top_token_ids), (entry.logprob, *entry.top_logprobs), strict=True
    )
    return {
        str(each): {"logprob": logprob, "decoded_token": names.name(each)}
        for each, logprob in tokens
    }


def _top(token_id: int, logprob: float, names: TokenNames) -> answers.TopLogprob:
    data = names.bytes_of(token_id)
    return {"token": names.name(token_id), "logprob": logprob, "bytes": list(data)}
