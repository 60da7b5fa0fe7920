"""/v1/chat/completions: conversations that go on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from runtime.frontend.generator import Delta
from runtime.frontend.openai import answers
from runtime.frontend.openai.body import read_body
from runtime.frontend.openai.chat_body import ChatBody
from runtime.frontend.openai.chat_choice import ChatChoice
from runtime.frontend.openai.job import Head, Job, JsonObject, reason_of
from runtime.frontend.openai.logprobs import Entry, TokenNames, chat_logprobs, prompt_logprobs
from runtime.frontend.openai.long_bodies import LongBodies
from runtime.frontend.openai.parsing import ParserChoice, Parsing
from runtime.frontend.prompts import Chat, PromptReader
from runtime.request import ModelInfo
from runtime.sampling_params import SamplingParams


class _Asked(NamedTuple):
    """What a body says, but for how the chat reads as tokens."""

    body: ChatBody
    chat: Chat
    parsing: Parsing
    params: SamplingParams


class ChatRequest:
    """One request, read."""

    def __init__(self, body: ChatBody, job: Job, parsing: Parsing, prompt_text: str) -> None:
        self.job = job
        self._body = body
        self._parsing = parsing
        self._prompt_text = prompt_text

    @classmethod
    async def read(
        cls,
        content: bytes,
        reader: PromptReader,
        model: ModelInfo,
        bodies: LongBodies,
        parsers: ParserChoice,
    ) -> "ChatRequest":
        """Raises InvalidRequestError: a field is wrong. Raises ConfigError: the template is."""

        def read(content: bytes) -> _Asked:
            body = read_body(ChatBody, content)
            use = body.read_tool_use()
            chat = body.read_chat(use)
            parsing = parsers.parsing(use, has_form=body.has_form)
            return _Asked(body, chat, parsing, body.sampling_params(use))

        body, chat, parsing, params = await bodies.read(content, read)
        prompt = await reader.read_chat(chat)
        left = model.max_model_len - len(prompt.token_ids)
        if params.max_tokens is None and left >= max(1, params.min_tokens):
            params = replace(params, max_tokens=left)
        job = Job(
            prompts=[prompt.token_ids],
            params=params,
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            is_stream=bool(body.stream),
            includes_usage=body.includes_usage,
            kept_special_ids=_special_ids(reader, parsing),
        )
        return cls(body, job, parsing, prompt.text)

    @property
    def model(self) -> str:
        return self._body.model

    @property
    def request_id(self) -> str | None:
        return self._body.request_id

    async def writer(self, head: Head, reader: PromptReader) -> "ChatWriter":
        use = self._parsing.use
        choices = [
            ChatChoice(self._parsing.make_parser(self._prompt_text), use)
            for _ in range(self.job.params.n)
        ]
        return ChatWriter(head, self.job, choices, TokenNames(reader.tokenizer))


class ChatWriter:
    """A role begins a choice's deltas, a finish reason alone ends them."""

    def __init__(
        self, head: Head, job: Job, choices: Sequence[ChatChoice], names: TokenNames
    ) -> None:
        self._head = head
        self._job = job
        self._choices = choices
        self._names = names
        self._has_logprobs = job.params.logprobs is not None
        self._scores: list[Entry] = []  # of the prompt

    def chunks(self, place: int, delta: Delta) -> list[JsonObject]:
        """What the next delta adds."""
        choice = self._choices[delta.index]
        deltas = self._push(delta)
        if not choice.has_begun:
            choice.has_begun = True
            deltas.insert(0, {"role": "assistant", "content": ""})
        if choice.finish_reason is not None:
            deltas.append({})
        chunks: list[JsonObject] = []
        for number, each in enumerate(deltas, start=1):
            is_last = number == len(deltas)
            entry: answers.ChatChunkChoice = {
                "index": delta.index,
                "delta": each,
                "logprobs": None if "role" in each else self._take_logprobs(choice),
                "finish_reason": choice.finish_reason if is_last else None,
            }
            chunks.append(self._chunk([entry], None))
        return chunks

    def usage_chunk(self, usage: answers.Usage) -> JsonObject:
        return self._chunk([], usage)

    def extend(self, place: int, delta: Delta) -> None:
        """Keeps the next delta for the whole answer."""
        self._push(delta)

    def whole(self, usage: answers.Usage) -> JsonObject:
        choices: list[answers.ChatChoice] = []
        for index, choice in enumerate(self._choices):
            assert choice.finish_reason is not None, "all choices have ended"
            logprobs = chat_logprobs(choice.logprobs, self._names) if self._has_logprobs else None
            choices.append(
                {
                    "index": index,
                    "message": choice.message(),
                    "logprobs": logprobs,
                    "finish_reason": choice.finish_reason,
                }
            )
        answer: answers.ChatCompletion = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
            "choices": choices,
            "usage": usage,
        }
        if self._job.params.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._scores, self._names)
        return answer

    def _push(self, delta: Delta) -> list[answers.MessageDelta]:
        choice = self._choices[delta.index]
        self._scores += delta.scores
        choice.logprobs += zip(delta.token_ids, delta.logprobs, strict=False)
        return choice.push(delta.text, reason_of(delta.finish_reason))

    def _take_logprobs(self, choice: ChatChoice) -> answers.ChatLogprobs | None:
        """Those that weren't told; tokens whose text was held back come with what follows."""
        if not choice.logprobs:
            return None
        told, choice.logprobs = choice.logprobs, []
        return chat_logprobs(told, self._names)

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self._head.request_id}"

    def _chunk(
        self, choices: list[answers.ChatChunkChoice], usage: answers.Usage | None
    ) -> answers.ChatChunk:
        chunk: answers.ChatChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
            "choices": choices,
        }
        if usage is not None or self._job.includes_usage:
            chunk["usage"] = usage
        return chunk


def _special_ids(reader: PromptReader, parsing: Parsing) -> frozenset[int]:
    """Special tokens that the parser looks for."""
    if reader.tokenizer is None:
        return frozenset()
    return reader.tokenizer.special_ids_with(parsing.marks)
