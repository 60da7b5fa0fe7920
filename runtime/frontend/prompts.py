"""What clients send as prompts, turned into token ids."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

from protos import inference_pb2
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
        self._max_prompt_bytes = max_prompt_bytes
        self._chat_template_timeout_s = chat_template_timeout_s
        self._long_texts = asyncio.Semaphore(1)

    async def read(self, request: inference_pb2.GenerateRequest) -> list[int]:
        """Raises InvalidRequestError: it has no prompt, or one that can't be read."""
        match request.WhichOneof("prompt"):
            case "text":
                if not request.text:
                    # Also where the tokenizer would add a token that begins every text.
                    raise InvalidRequestError("prompt is empty: it must have at least 1 character")
                return await self.encode("prompt", request.text)
            case "token_ids":
                return self._bounded(request.token_ids.ids)
            case "chat":
                text = await self._render(request.chat)
                return await self.encode("the rendered chat", text, add_special_tokens=False)
            case _:
                raise InvalidRequestError("prompt is missing: set text, token_ids or chat")

    async def encode(self, name: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequestError: the text, called `name`, is too long, or no text."""
        num_bytes = len(text.encode())
        if num_bytes > self._max_prompt_bytes:
            raise InvalidRequestError(
                f"{name} of {num_bytes} bytes is longer than "
                f"max_prompt_bytes={self._max_prompt_bytes}"
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

    def _bounded(self, token_ids: Sequence[int]) -> list[int]:
        """A copy of the ids, which are not too many: millions would stall all other requests."""
        limit = self._model.max_model_len
        if len(token_ids) > limit:
            raise InvalidRequestError(
                f"prompt of {len(token_ids)} tokens is more than max_model_len={limit}"
            )
        return list(token_ids)

    async def _render(self, chat: inference_pb2.Chat) -> str:
        if self._template is None:
            raise missing_template(self._model.name)
        _check_size("messages", len(chat.messages), MAX_MESSAGES)
        _check_size("tools", len(chat.tools), MAX_TOOLS)
        if chat.ByteSize() > self._max_prompt_bytes:
            raise InvalidRequestError(
                f"chat of {chat.ByteSize()} bytes is longer than "
                f"max_prompt_bytes={self._max_prompt_bytes}"
            )
        begins = not chat.continue_final_message
        if chat.HasField("add_generation_prompt"):
            begins = chat.add_generation_prompt
        return await self._template.render(
            [_message_of(place, each) for place, each in enumerate(chat.messages)],
            tools=[_object(f"tools[{place}]", each) for place, each in enumerate(chat.tools)],
            arguments=_object("template_arguments", chat.template_arguments),
            add_generation_prompt=begins,
            continue_final_message=chat.continue_final_message,
            timeout_s=self._chat_template_timeout_s,
        )


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


def _check_size(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequestError(f"{name} has {count} entries: must be at most {most}")


def _message_of(place: int, message: inference_pb2.ChatMessage) -> dict[str, Any]:
    fields = _object(f"messages[{place}].fields", message.fields)
    for name in ("role", "content"):
        if name in fields:
            raise InvalidRequestError(
                f"messages[{place}].fields has {name!r}: the message's own field {name} sets it"
            )
    content = message.content if message.HasField("content") else None
    return {"role": message.role, "content": content, **fields}


def _object(name: str, text: str) -> dict[str, Any]:
    """The JSON object in the field `name`; an empty one where it is unset."""
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} is a JSON {type(value).__name__}: must be an object")
    return value
