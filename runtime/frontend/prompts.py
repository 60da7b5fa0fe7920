"""What clients send as prompts, turned into token ids."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runtime.errors import InvalidRequestError
from runtime.frontend.chat import ChatTemplate, missing_template
from runtime.frontend.text import Tokenizer
from runtime.request import ModelInfo
from runtime.sampling_params import SamplingParams

LONG_TEXT_BYTES = 64 << 10
MAX_BAD_WORD_TOKENS = 64
# What a word may stand right after.
WORD_ANCHORS = ("\n", "(", "a")
# More would hold up the other requests while they are looked at.
MAX_MESSAGES = 4096
MAX_TOOLS = 1024

BadWords = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation to go on with, as clients of chat APIs know it."""

    messages: Sequence[object]
    tools: Sequence[object] = ()
    arguments: dict[str, Any] = field(default_factory=dict)  # variables for the template
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatPrompt(NamedTuple):
    """A chat as the model gets it."""

    token_ids: list[int]
    text: str


class PromptReader:
    """For one event loop, which long texts don't hold up.

    `tokenizer` and `template` are None where the model has none.
    """

    def __init__(
        self,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        *,
        max_prompt_bytes: int,
        chat_template_timeout_s: float,
    ) -> None:
        self.tokenizer = tokenizer
        self._model = model
        self._template = template
        self.max_prompt_bytes = max_prompt_bytes
        self._chat_template_timeout_s = chat_template_timeout_s
        self._long_texts = asyncio.Semaphore(1)

    async def read_text(self, text: str) -> list[int]:
        """Raises InvalidRequestError: it is empty, too long, or no text."""
        if not text:
            # Also where the tokenizer would add a token that begins every text.
            raise InvalidRequestError("prompt is empty: it must have at least 1 character")
        return await self.encode("prompt", text)

    def read_ids(self, token_ids: Sequence[int]) -> list[int]:
        """A copy of the ids, which are not too many: millions would stall all other requests.

        Raises InvalidRequestError: they are.
        """
        limit = self._model.max_model_len
        if len(token_ids) > limit:
            raise InvalidRequestError(
                f"prompt of {len(token_ids)} tokens is more than max_model_len={limit}"
            )
        return list(token_ids)

    async def read_chat(self, chat: Chat) -> ChatPrompt:
        """Raises InvalidRequestError: there is no template, or it can't render the chat."""
        if self._template is None:
            raise missing_template(self._model.name)
        check_chat_size(len(chat.messages), len(chat.tools))
        text = await self._template.render(
            chat.messages,
            tools=chat.tools,
            arguments=chat.arguments,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            timeout_s=self._chat_template_timeout_s,
        )
        token_ids = await self.encode("the rendered chat", text, add_special_tokens=False)
        return ChatPrompt(token_ids, text)

    async def encode(self, name: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequestError: the text, called `name`, is too long, or no text."""
        num_bytes = len(text.encode())
        if num_bytes > self.max_prompt_bytes:
            raise InvalidRequestError(
                f"{name} of {num_bytes} bytes is longer than "
                f"max_prompt_bytes={self.max_prompt_bytes}"
            )
        tokenizer = self.require_tokenizer()

        def encode() -> list[int]:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        if num_bytes <= LONG_TEXT_BYTES:
            return await asyncio.to_thread(encode)
        # One after another, so that short prompts find a core and memory stays bounded.
        async with self._long_texts:
            return await asyncio.to_thread(encode)

    async def bad_words(self, params: SamplingParams) -> BadWords:
        """Those of `params`, as tokens."""
        check_texts(params, self.tokenizer)
        if not params.bad_words:
            return ()
        return await asyncio.to_thread(encode_bad_words, self.require_tokenizer(), params.bad_words)

    def require_tokenizer(self) -> Tokenizer:
        """Raises InvalidRequestError: the model has none."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"model {self._model.name} has no tokenizer.json, so this server can't turn "
                "text into tokens or back: send token_ids"
            )
        return self.tokenizer


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> BadWords:
    """Each word in the ways that the tokenizer writes it: alone, after a space, inside a text.

    Raises InvalidRequestError: a word has too many tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words):
        alone = tuple(tokenizer.encode(word, add_special_tokens=False))
        if len(alone) > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words[{place}] has {len(alone)} tokens: must be at most {MAX_BAD_WORD_TOKENS}"
            )
        spaced = tuple(tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False))
        ways = [alone, spaced, *_encode_inside(tokenizer, word)]
        found |= {tokens: None for tokens in ways if tokens}
    return tuple(found)


def _encode_inside(tokenizer: Tokenizer, word: str) -> Iterator[tuple[int, ...]]:
    """As in the middle of a text: some tokenizers put a space before each text's first word."""
    for anchor in WORD_ANCHORS:
        before = tokenizer.encode(anchor, add_special_tokens=False)
        tokens = tokenizer.encode(anchor + word, add_special_tokens=False)
        if tokens[: len(before)] == before:  # else the anchor is a part of the word's first token
            yield tuple(tokens[len(before) :])


def check_texts(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    """Raises InvalidRequestError: `params` has texts, and there is no tokenizer to read them."""
    for name in ("stop", "bad_words"):
        if tokenizer is None and getattr(params, name):
            raise InvalidRequestError(
                f"{name} is set, and the model has no tokenizer.json: leave it unset"
            )


def check_chat_size(num_messages: int, num_tools: int) -> None:
    """Raises InvalidRequestError: a chat has too many of them."""
    sizes = (("messages", num_messages, MAX_MESSAGES), ("tools", num_tools, MAX_TOOLS))
    for name, count, most in sizes:
        if count > most:
            raise InvalidRequestError(f"{name} has {count} entries: must be at most {most}")
