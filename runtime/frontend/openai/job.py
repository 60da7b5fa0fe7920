"""What both ways of generating have in common: prompts to start, and a writer for the answer."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from runtime.errors import ModelOutputError
from runtime.frontend.generator import Delta, TextStream
from runtime.frontend.openai.answers import FinishReason, Usage
from runtime.request import FinishReason as EngineReason
from runtime.sampling_params import SamplingParams

JsonObject: TypeAlias = Mapping[str, Any]
_REASONS: Mapping[EngineReason, FinishReason] = {
    EngineReason.STOP: "stop",
    EngineReason.LENGTH: "length",
}


class Head(NamedTuple):
    """What all parts of an answer begin with."""

    request_id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that was read; its prompts are generated at once."""

    prompts: Sequence[list[int]]
    params: SamplingParams
    cache_salt: str
    priority: int
    is_stream: bool
    includes_usage: bool  # at the stream's end
    is_scoring: bool = False  # what is generated isn't told
    kept_special_ids: frozenset[int] = frozenset()  # in texts that have no others


class Writer(Protocol):
    """Makes one answer, whole or in chunks, of what its streams bring."""

    def chunks(self, place: int, delta: Delta) -> list[JsonObject]:
        """What the next delta of the prompt at `place` adds."""
        ...

    def usage_chunk(self, usage: Usage) -> JsonObject: ...

    def extend(self, place: int, delta: Delta) -> None:
        """Keeps the next delta for the whole answer."""
        ...

    def whole(self, usage: Usage) -> JsonObject: ...


async def read_all(streams: Sequence[TextStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """What streams bring, as it comes, each with its stream's place. Close it in the end.

    Raises what the first stream to fail raises.
    """
    waiting: dict[asyncio.Task[Delta | None], int] = {}

    def wait_for(place: int) -> None:
        # A task's StopAsyncIteration would be lost in `result`.
        waiting[asyncio.create_task(_next(streams[place]))] = place

    try:
        if len(streams) == 1:
            async for delta in streams[0]:
                yield 0, delta
            return
        for place in range(len(streams)):
            wait_for(place)
            await give_way()
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda each: waiting[each]):
                place, next_delta = waiting.pop(task), task.result()
                if next_delta is not None:
                    wait_for(place)
                    yield place, next_delta
                    await give_way()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def give_way() -> None:
    """Lets other requests have a turn, between the many prompts of one."""
    await asyncio.sleep(0)


def usage_of(streams: Sequence[TextStream], *, is_scoring: bool) -> Usage:
    """Of all prompts and choices together."""
    each = [stream.usage for stream in streams]
    num_prompt_tokens = sum(usage.num_prompt_tokens for usage in each)
    num_output_tokens = 0 if is_scoring else sum(usage.num_output_tokens for usage in each)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in each)},
    }


def reason_of(reason: EngineReason | None) -> FinishReason | None:
    """Raises ModelOutputError: the choice was given up."""
    if reason is EngineReason.ABORT:
        raise ModelOutputError("the output was given up by the engine")
    return None if reason is None else _REASONS[reason]


async def _next(stream: TextStream) -> Delta | None:
    async for delta in stream:
        return delta
    return None
