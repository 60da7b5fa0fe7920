"""/v1/completions: texts that go on."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.frontend.generator import Delta
from runtime.frontend.openai import answers
from runtime.frontend.openai.body import read_body
from runtime.frontend.openai.completion_body import (
    CompletionBody,
    Prompt,
    check_choices,
    check_ids,
    encode_prompts,
    read_prompts,
)
from runtime.frontend.openai.job import Head, Job, JsonObject, reason_of
from runtime.frontend.openai.logprobs import (
    Entry,
    OffsetCounter,
    TokenNames,
    completion_logprobs,
    prompt_logprobs,
)
from runtime.frontend.openai.long_bodies import LongBodies
from runtime.frontend.prompts import PromptReader
from runtime.request import ModelInfo
from runtime.sampling_params import SamplingParams


class _Asked(NamedTuple):
    """What a body says, but for how its texts read as tokens."""

    body: CompletionBody
    params: SamplingParams
    prompts: Sequence[Prompt]


class CompletionRequest:
    """One request, read."""

    def __init__(self, body: CompletionBody, prompts: Sequence[Prompt], job: Job) -> None:
        self.job = job
        self._body = body
        self._prompts = prompts

    @classmethod
    async def read(
        cls, content: bytes, reader: PromptReader, model: ModelInfo, bodies: LongBodies
    ) -> "CompletionRequest":
        """Raises InvalidRequestError: a field is wrong."""

        def read(content: bytes) -> _Asked:
            body = read_body(CompletionBody, content)
            params = body.sampling_params()
            prompts = read_prompts(body.prompt)
            check_choices(len(prompts), params.n)
            check_ids(prompts, reader, model)
            return _Asked(body, params, prompts)

        body, params, prompts = await bodies.read(content, read)
        job = Job(
            prompts=await encode_prompts(prompts, reader),
            params=params,
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            is_stream=bool(body.stream),
            includes_usage=body.includes_usage,
            is_scoring=body.is_scoring,
        )
        return cls(body, prompts, job)

    @property
    def model(self) -> str:
        return self._body.model

    @property
    def request_id(self) -> str | None:
        return self._body.request_id

    async def writer(self, head: Head, reader: PromptReader) -> "CompletionWriter":
        """Once the prompts are known to be of the model's vocabulary."""
        echoes = [""] * len(self._prompts)
        if self._body.echo and reader.tokenizer is not None:
            tokenizer, skips = reader.tokenizer, self.job.params.skip_special_tokens
            echoes = [
                each
                if isinstance(each, str)
                else await asyncio.to_thread(tokenizer.decode, each, skip_special_tokens=skips)
                for each in self._prompts
            ]
        return CompletionWriter(head, self._body, self.job, echoes, TokenNames(reader.tokenizer))


@dataclass(slots=True)
class _Choice:
    offsets: OffsetCounter
    has_begun: bool = False
    texts: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    finish_reason: answers.FinishReason | None = None


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    entries: Sequence[Entry]


class CompletionWriter:
    """Its choices are counted over all prompts."""

    def __init__(
        self,
        head: Head,
        body: CompletionBody,
        job: Job,
        echoes: Sequence[str],
        names: TokenNames,
    ) -> None:
        """`echoes` are the prompts as texts."""
        self._head = head
        self._job = job
        self._echoes = echoes if body.echo else None
        self._names = names
        self._has_logprobs = body.logprobs is not None
        self._tells_scores = body.prompt_logprobs is not None
        self._scores: list[list[Entry]] = [[] for _ in job.prompts]
        skips = job.params.skip_special_tokens
        self._choices: list[_Choice] = []
        for prompt in job.prompts:
            is_after_text = any(names.is_shown(each, skips_special=skips) for each in prompt)
            begins_text = bool(body.echo) or not is_after_text
            self._choices += [
                _Choice(OffsetCounter(names, skips_special=skips, begins_text=begins_text))
                for _ in range(job.params.n)
            ]

    def chunks(self, place: int, delta: Delta) -> list[JsonObject]:
        """What the next delta of the prompt at `place` adds."""
        choice, piece = self._advance(place, delta)
        reason = self._reason(delta)
        if piece is None or not (piece.text or piece.entries or reason):
            return []
        index = self._index(place, delta)
        entry = self._entry(index, choice, piece.text, piece.entries, reason)
        return [self._answer([entry], None)]

    def usage_chunk(self, usage: answers.Usage) -> JsonObject:
        return self._answer([], usage)

    def extend(self, place: int, delta: Delta) -> None:
        """Keeps the next delta for the whole answer."""
        choice, piece = self._advance(place, delta)
        if piece is not None:
            choice.texts.append(piece.text)
            choice.entries += piece.entries
        choice.finish_reason = self._reason(delta)

    def whole(self, usage: answers.Usage) -> JsonObject:
        entries = [
            self._entry(index, each, "".join(each.texts), each.entries, each.finish_reason)
            for index, each in enumerate(self._choices)
        ]
        if self._tells_scores:
            for index, entry in enumerate(entries):
                scores = self._scores[index // self._job.params.n]
                entry["prompt_logprobs"] = prompt_logprobs(scores, self._names)
        return self._answer(entries, usage)

    def _advance(self, place: int, delta: Delta) -> tuple[_Choice, _Piece | None]:
        """None: the delta has nothing but scores of the prompt."""
        self._scores[place] += delta.scores
        choice = self._choices[self._index(place, delta)]
        if not (delta.token_ids or delta.text or delta.finish_reason):
            return choice, None
        text, entries = delta.text, list[Entry](zip(delta.token_ids, delta.logprobs, strict=False))
        if self._job.is_scoring:
            text, entries = "", []
        if self._echoes is not None and not choice.has_begun:
            text = self._echoes[place] + text
            entries = [*self._scores[place], *entries]
        choice.has_begun = True
        return choice, _Piece(text, entries if self._has_logprobs else ())

    def _index(self, place: int, delta: Delta) -> int:
        return place * self._job.params.n + delta.index

    def _reason(self, delta: Delta) -> answers.FinishReason | None:
        reason = reason_of(delta.finish_reason)
        return "length" if reason is not None and self._job.is_scoring else reason

    def _entry(
        self,
        index: int,
        choice: _Choice,
        text: str,
        entries: Sequence[Entry],
        reason: answers.FinishReason | None,
    ) -> answers.CompletionChoice:
        logprobs = None
        if self._has_logprobs:
            logprobs = completion_logprobs(entries, self._names, choice.offsets)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _answer(
        self, choices: list[answers.CompletionChoice], usage: answers.Usage | None
    ) -> answers.Completion:
        answer: answers.Completion = {
            "id": f"cmpl-{self._head.request_id}",
            "object": "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.fingerprint,
            "choices": choices,
        }
        if usage is not None or self._job.includes_usage:
            answer["usage"] = usage
        return answer
