"""Streams completions from a server, by gRPC or by OpenAI's API, and tells when tokens came."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import grpc
import grpc.aio

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import bearer

NUM_CHANNELS = 4  # requests share a gRPC connection with others
MAX_LINE_BYTES = 1 << 20
MAX_S = 3600.0  # a request that takes longer has failed


class FailedRequest(Exception):
    """The server refused it or broke off; the message is the server's."""


@dataclass(slots=True)
class Answer:
    """What came of a request. Times are of time.perf_counter."""

    sent_s: float
    num_tokens: int = 0
    arrivals_s: list[float] = field(default_factory=list)  # of each message that had tokens

    @property
    def ttft_s(self) -> float:
        """To the first token."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def total_s(self) -> float:
        return self.arrivals_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None where there was one alone."""
        if self.num_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between one message and the next: what a reader sees, whatever tokens each had."""
        return [
            later - earlier
            for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        ]


class Client(Protocol):
    async def complete(self, prompt: Sequence[int], output_len: int) -> Answer:
        """Greedy, past any end token. Raises FailedRequest."""


class GrpcClient:
    """Lockstep's own API. Made by `grpc_client`."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], api_key: str) -> None:
        stub = inference_pb2_grpc.InferenceStub
        self._stubs = [stub(each) for each in channels]  # type: ignore[no-untyped-call]
        self._metadata = bearer(api_key)
        self._num_sent = 0

    async def complete(self, prompt: Sequence[int], output_len: int) -> Answer:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling_params=common_pb2.SamplingParams(
                max_tokens=output_len, temperature=0, ignore_eos=True
            ),
        )
        stub = self._stubs[self._num_sent % len(self._stubs)]
        self._num_sent += 1
        answer = Answer(time.perf_counter())
        try:
            async for response in stub.Generate(request, metadata=self._metadata, timeout=MAX_S):
                if response.token_ids:
                    answer.arrivals_s.append(time.perf_counter())
                    answer.num_tokens += len(response.token_ids)
        except grpc.aio.AioRpcError as error:
            raise FailedRequest(f"{error.code().name}: {error.details()}") from error
        return _whole(answer)


class OpenAIClient:
    """Any server of OpenAI's completions. Made by `openai_client`."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, extra: Mapping[str, object]
    ) -> None:
        self._session = session
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._body = {
            "model": model,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }

    async def complete(self, prompt: Sequence[int], output_len: int) -> Answer:
        body = {**self._body, "prompt": list(prompt), "max_tokens": output_len}
        answer = Answer(time.perf_counter())
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    raise FailedRequest(f"{response.status}: {(await response.text())[:300]}")
                async for line in response.content:
                    _read_event(line, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise FailedRequest(f"{type(error).__name__}: {error}") from error
        return _whole(answer)


def _read_event(line: bytes, answer: Answer) -> None:
    """A line of a stream of events: a part of the answer, the usage at its end, or neither."""
    if not line.startswith(b"data:"):
        return
    data = line[len(b"data:") :].strip()
    if data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        raise FailedRequest(str(event["error"])[:300])
    # An event may have several tokens: the server counts them.
    if event.get("usage"):
        answer.num_tokens = event["usage"]["completion_tokens"]
    for choice in event.get("choices", ()):
        # Some servers end with a choice that brings no token, others with the last token's.
        if choice.get("text") or choice.get("finish_reason") is None:
            answer.arrivals_s.append(time.perf_counter())


def _whole(answer: Answer) -> Answer:
    if not answer.num_tokens or not answer.arrivals_s:
        raise FailedRequest("the stream ended without a token, or without its usage")
    return answer


@asynccontextmanager
async def grpc_client(address: str, api_key: str) -> AsyncIterator[GrpcClient]:
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(NUM_CHANNELS)]
    try:
        yield GrpcClient(channels, api_key)
    finally:
        for channel in channels:
            await channel.close()


@asynccontextmanager
async def openai_client(
    url: str, *, model: str, api_key: str | None = None, extra: Mapping[str, object] | None = None
) -> AsyncIterator[OpenAIClient]:
    """`extra` are members of each request's body beside OpenAI's."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(
        # A server that stood still meanwhile may be about to close what was kept.
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=MAX_S),
        headers=headers,
        read_bufsize=MAX_LINE_BYTES,
    ) as session:
        yield OpenAIClient(session, url, model, extra or {})
