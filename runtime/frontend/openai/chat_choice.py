"""One choice of a chat's answer, put together of what its parser finds."""

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

from runtime.frontend.openai.answers import FinishReason, Message, MessageDelta, ToolCall
from runtime.frontend.openai.tools import ToolUse
from runtime.frontend.parsers.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    OutputParser,
    Reasoning,
)

if TYPE_CHECKING:
    from runtime.request import TokenLogprobs


class ChatChoice:
    """Gives deltas as they come, and the whole message of them."""

    def __init__(self, parser: OutputParser, use: ToolUse) -> None:
        self.logprobs: list[tuple[int, TokenLogprobs]] = []  # that weren't told yet
        self.has_begun = False
        self.finish_reason: FinishReason | None = None
        self._parser = parser
        self._use = use
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, text: str, reason: FinishReason | None) -> list[MessageDelta]:
        """What the next piece of text adds; with a reason, it is the last one."""
        events = self._parser.push(text)
        if reason is not None:
            events = [*events, *self._parser.finish()]
        deltas = list(self._deltas(events))
        if reason == "stop" and self._calls and not self._use.is_named:
            reason = "tool_calls"
        self.finish_reason = reason
        return deltas

    def message(self) -> Message:
        """Of all that was pushed."""
        content = "".join(self._content)
        message: Message = {
            "role": "assistant",
            "content": content if content or not self._calls else None,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _deltas(self, events: list[Event]) -> Iterator[MessageDelta]:
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                    yield {"content": text}
                case Reasoning(text):
                    self._reasoning.append(text)
                    yield {"reasoning_content": text}
                case CallStart(place, name) if self._is_wanted(place):
                    yield {"tool_calls": [self._start(place, name)]}
                case CallArguments(place, json) if self._is_wanted(place):
                    self._calls[place]["function"]["arguments"] += json
                    yield {"tool_calls": [{"index": place, "function": {"arguments": json}}]}

    def _start(self, place: int, name: str) -> ToolCall:
        call: ToolCall = {
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        self._calls.append(call)
        return {"index": place, **call, "function": {"name": name, "arguments": ""}}

    def _is_wanted(self, place: int) -> bool:
        """Without parallel calls, only the first is told."""
        return self._use.is_parallel or place == 0
