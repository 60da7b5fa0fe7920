"""Asks a server by each of its ways, and leaves where it has waited long enough."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
import grpc.aio

from benchmarks.http_post import posted
from benchmarks.overload.client import NUM_CHANNELS, Target
from benchmarks.soak.asks import Ask, Way, find_fault
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import bearer

# Nothing takes so long, even where requests are preempted again and again.
PATIENCE_S = 120.0
DATA, DONE = b"data: ", b"[DONE]"
END_NAMES = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class Answer:
    """What came, by choice."""

    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    token_ids: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, str] = field(default_factory=dict)  # stop or length

    def differs_from(self, other: "Answer") -> bool:
        """Only gRPC tells ids."""
        pairs: list[tuple[object, object]] = [
            (self.ends, other.ends),
            (_not_empty(self.texts), _not_empty(other.texts)),
        ]
        if self.token_ids and other.token_ids:
            pairs.append((self.token_ids, other.token_ids))
        return any(mine != theirs for mine, theirs in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one request ended."""

    ask: Ask
    way: Way
    end: Literal["answered", "left", "failed"]
    answer: Answer
    detail: str = ""


class FailedError(Exception):
    """A request was answered with an error."""


class Client:
    """For one event loop. Made by `connected`."""

    def __init__(self, target: Target, channels: list[grpc.aio.Channel]) -> None:
        self._target = target
        stub = inference_pb2_grpc.InferenceStub
        self._stubs = [stub(each) for each in channels]  # type: ignore[no-untyped-call]
        self._num_asked = 0
        self._metadata = bearer(target.api_key)

    async def ask(self, ask: Ask, way: Way, *, leave_after_s: float | None) -> Outcome:
        """Hangs up after `leave_after_s`, wherever the request is by then."""
        answer = Answer()
        send = self._by_grpc if way == "grpc" else self._by_http
        self._num_asked += 1
        detail = ""
        try:
            async with asyncio.timeout(leave_after_s or PATIENCE_S):
                await send(ask, way, answer)
        except TimeoutError:
            if leave_after_s is not None:
                return Outcome(ask=ask, way=way, end="left", answer=answer)
            detail = f"no end within {PATIENCE_S:g} s"
        except (OSError, FailedError) as error:
            detail = f"{type(error).__name__}: {error}"
        else:
            detail = find_fault(ask, answer.texts, answer.ends) or ""
        end: Literal["answered", "failed"] = "failed" if detail else "answered"
        return Outcome(ask=ask, way=way, end=end, answer=answer, detail=detail)

    async def _by_grpc(self, ask: Ask, way: Way, answer: Answer) -> None:
        request = inference_pb2.GenerateRequest(
            text=ask.prompt,
            sampling_params=common_pb2.SamplingParams(**ask.params),
            priority=ask.priority,
        )
        stub = self._stubs[self._num_asked % len(self._stubs)]
        call = stub.Generate(request, metadata=self._metadata)
        try:
            async for response in call:
                answer.texts[response.index] += response.text
                answer.token_ids[response.index] += response.token_ids
                if response.finish_reason:
                    reason = response.finish_reason
                    answer.ends[response.index] = END_NAMES.get(reason, str(reason))
        except grpc.aio.AioRpcError as error:
            raise FailedError(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()

    async def _by_http(self, ask: Ask, way: Way, answer: Answer) -> None:
        body = {"model": self._target.model, "stream": True, "priority": ask.priority}
        body |= ask.params
        path = "/v1/completions"
        if way == "chat":
            body["messages"] = [{"role": "user", "content": ask.prompt}]
            path = "/v1/chat/completions"
        else:
            body["prompt"] = ask.prompt
        address, key = self._target.http_address, self._target.api_key
        async with posted(address, path, body, api_key=key) as reply:
            if reply.status != 200:
                error = (await reply.body.read()).decode(errors="replace")
                raise FailedError(f"{reply.status}: {error}")
            async for line in reply.body:
                if not line.startswith(DATA):
                    continue
                content = line.removeprefix(DATA).strip()
                if content == DONE:
                    return
                _take(json.loads(content), answer)
        raise FailedError("the stream ended early")


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Client]:
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [
        grpc.aio.insecure_channel(target.grpc_address, options) for _ in range(NUM_CHANNELS)
    ]
    try:
        yield Client(target, channels)
    finally:
        for channel in channels:
            await channel.close()


def _not_empty(texts: Mapping[int, str]) -> dict[int, str]:
    return {choice: text for choice, text in texts.items() if text}


def _take(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        raise FailedError(str(event["error"]))
    for choice in event["choices"]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        answer.texts[choice["index"]] += text or ""
        if choice["finish_reason"] is not None:
            answer.ends[choice["index"]] = choice["finish_reason"]
