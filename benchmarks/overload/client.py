"""Sends requests to a running server, by HTTP and by gRPC, and says how each ended."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import grpc
import grpc.aio

from benchmarks.http_post import posted
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import bearer

MAX_TOKENS = 16
# So many requests share a gRPC connection with others.
NUM_CHANNELS = 4
PUSHBACK = "grpc-retry-pushback-ms"
REJECTED = grpc.StatusCode.RESOURCE_EXHAUSTED
# A client that waits longer gives up; by HTTP it hangs up.
PATIENCE_S = 30.0

Way = Literal["http", "grpc"]
End = Literal["answered", "rejected", "late", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server."""

    http_address: str
    grpc_address: str
    api_key: str
    model: str


class Outcome(NamedTuple):
    """How one request ended. Times are seconds since it was sent."""

    way: Way
    end: End
    total_s: float
    ttft_s: float | None = None  # to the first token
    num_tokens: int = 0
    has_hint: bool = False  # when to try again
    detail: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first."""
        if self.ttft_s is None or self.num_tokens < 2:
            return None
        return (self.total_s - self.ttft_s) / (self.num_tokens - 1)


class Client:
    """For one event loop. Made by `connected`."""

    def __init__(self, target: Target, channels: list[grpc.aio.Channel]) -> None:
        self._target = target
        stub = inference_pb2_grpc.InferenceStub
        self._stubs = [stub(each) for each in channels]  # type: ignore[no-untyped-call]
        self._metadata = bearer(target.api_key)

    async def ask(self, number: int) -> Outcome:
        """Sends request `number`: even ones by HTTP, odd ones by gRPC."""
        # It begins with its number, so that no other has computed its prompt.
        prompt = f"{number} is the number of a day on which the sun rose over the old harbour. " * 2
        way: Way = "grpc" if number % 2 else "http"
        send = self._by_grpc if number % 2 else self._by_http
        sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await send(number, prompt, sent_s)
        except TimeoutError:
            return Outcome(way, "late", time.perf_counter() - sent_s)
        except OSError as error:
            detail = f"{type(error).__name__}: {error}"
            return Outcome(way, "failed", time.perf_counter() - sent_s, detail=detail)

    async def _by_grpc(self, number: int, prompt: str, sent_s: float) -> Outcome:
        params = common_pb2.SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(text=prompt, sampling_params=params)
        stub = self._stubs[number // 2 % len(self._stubs)]
        ttft_s, num_tokens = None, 0
        call = stub.Generate(request, metadata=self._metadata, timeout=PATIENCE_S)
        try:
            async for response in call:
                num_tokens += len(response.token_ids)
                if ttft_s is None and num_tokens:
                    ttft_s = time.perf_counter() - sent_s
        except grpc.aio.AioRpcError as error:
            total_s = time.perf_counter() - sent_s
            hints = {key for key, _ in error.trailing_metadata() or ()}
            if error.code() is REJECTED and ttft_s is None:
                detail = error.details() or ""
                return Outcome("grpc", "rejected", total_s, None, 0, PUSHBACK in hints, detail)
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            detail = f"{error.code().name}: {error.details()}"
            return Outcome("grpc", "late" if is_late else "failed", total_s, detail=detail)
        return Outcome("grpc", "answered", time.perf_counter() - sent_s, ttft_s, num_tokens)

    async def _by_http(self, number: int, prompt: str, sent_s: float) -> Outcome:
        body = {
            "model": self._target.model,
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        target = self._target
        async with posted(target.http_address, "/v1/completions", body, api_key=target.api_key) as (
            status,
            headers,
            answer,
        ):
            if status == 200:
                return await _read_events(answer, sent_s)
            detail = (await answer.read()).decode(errors="replace")
            total_s = time.perf_counter() - sent_s
            if status == 429:
                has_hint = "retry-after" in headers
                return Outcome("http", "rejected", total_s, None, 0, has_hint, detail)
            return Outcome("http", "failed", total_s, detail=f"{status}: {detail}")


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


async def _read_events(reader: asyncio.StreamReader, sent_s: float) -> Outcome:
    ttft_s = None
    async for line in reader:
        if line == b"data: [DONE]\n":
            # A chunk may have several tokens, so they aren't counted.
            return Outcome("http", "answered", time.perf_counter() - sent_s, ttft_s, MAX_TOKENS)
        if line.startswith(b'data: {"error"'):
            return Outcome("http", "failed", time.perf_counter() - sent_s, detail=line.decode())
        if line.startswith(b"data: "):
            ttft_s = ttft_s or time.perf_counter() - sent_s
    raise ConnectionError("the stream ended early")
