"""Asks a running server through its public ports, and puts together what streams back."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio

from benchmarks.chaos.asks import Ask
from benchmarks.overload.client import Target
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import bearer

# A request that sees outage after outage takes minutes. One that takes longer counts as lost.
PATIENCE_S = 900.0


@dataclass(slots=True)
class Choice:
    """One choice of a request, as it came."""

    tokens: list[int | str] = field(default_factory=list)  # by gRPC ids; by HTTP their texts
    text: str = ""
    end: str = ""


Answer = dict[int, Choice]  # by the choice's index


class LostError(Exception):
    """A request has no answer, or half of one."""


class Client:
    """For one event loop. `on_tokens` is called for whatever comes."""

    def __init__(
        self, target: Target, channel: grpc.aio.Channel, on_tokens: Callable[[], None]
    ) -> None:
        self._target = target
        self._stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        self._metadata = bearer(target.api_key)
        self._on_tokens = on_tokens

    async def ask(self, ask: Ask) -> Answer:
        """Raises LostError: the request failed, or took longer than PATIENCE_S."""
        answer: Answer = {}
        try:
            async with asyncio.timeout(PATIENCE_S):
                await (self._by_grpc if ask.way == "grpc" else self._by_http)(ask, answer)
        except TimeoutError:
            raise LostError(f"no end within {PATIENCE_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise LostError(f"{error.code().name}: {error.details()}") from error
        except OSError as error:
            raise LostError(f"{type(error).__name__}: {error}") from error
        if len(answer) != ask.params.get("n", 1) or not all(each.end for each in answer.values()):
            raise LostError("the stream ended before its choices")
        return answer

    async def _by_grpc(self, ask: Ask, answer: Answer) -> None:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=ask.prompt),
            sampling_params=common_pb2.SamplingParams(**ask.params),
        )
        async for message in self._stub.Generate(request, metadata=self._metadata):
            choice = answer.setdefault(message.index, Choice())
            choice.tokens += message.token_ids
            choice.text += message.text
            if message.finish_reason:
                choice.end = common_pb2.FinishReason.Name(message.finish_reason)
            if message.token_ids:
                self._on_tokens()

    async def _by_http(self, ask: Ask, answer: Answer) -> None:
        body = {"logprobs": 0} | dict(ask.params)
        body |= {"model": self._target.model, "prompt": ask.prompt, "stream": True}
        async for event in self._events(json.dumps(body).encode()):
            if "error" in event:
                raise LostError(json.dumps(event["error"]))
            for part in event["choices"]:
                choice = answer.setdefault(part["index"], Choice())
                choice.tokens += (part["logprobs"] or {}).get("tokens", ())
                choice.text += part["text"]
                choice.end = part["finish_reason"] or choice.end
                self._on_tokens()

    async def _events(self, content: bytes) -> AsyncIterator[dict]:  # type: ignore[type-arg]
        """On a connection of its own. Raises LostError: the server answers something else."""
        host, port = self._target.http_address.rsplit(":", 1)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
            f"authorization: Bearer {self._target.api_key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head.encode() + content)
            if b" 200 " not in (first := await reader.readline()):
                rest = (await reader.read()).decode(errors="replace")
                raise LostError(f"{first.decode(errors='replace').strip()}: {rest}")
            async for line in reader:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))
        finally:
            writer.close()


@asynccontextmanager
async def connected(target: Target, on_tokens: Callable[[], None]) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(target.grpc_address) as channel:
        yield Client(target, channel, on_tokens)


async def status_of(target: Target, path: str) -> int:
    """What a GET without a key is answered with. Raises OSError: nobody answers."""
    host, port = target.http_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        first = await reader.readline()
        if not first:
            raise ConnectionError("the server hung up")
        return int(first.split()[1])
    finally:
        writer.close()
