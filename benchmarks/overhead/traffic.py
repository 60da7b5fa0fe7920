"""A frontend and its clients: a stream for each row, in processes of low priority."""

import asyncio
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import grpc.aio
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from benchmarks.overhead.cases import MAX_MODEL_LEN, PROMPT_TOKENS
from benchmarks.overhead.child import next_message
from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import bearer
from runtime.frontend.server import run_frontend as serve_frontend
from runtime.frontend_config import FrontendConfig

LEAST_PRIORITY = 19
HOST = "127.0.0.1"


def write_tokenizer(folder: Path) -> None:
    """A token for each byte, so that outputs have text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(byte) for byte in range(0x21, 0x7F)]
    others = [each for each in alphabet if each not in letters]
    # Ids of ASCII are those of ASCII.
    vocab = {letter: ord(letter) for letter in letters}
    free = (number for number in range(1, 300) if number not in vocab.values())
    vocab |= dict(zip(others, free, strict=False))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def run_frontend(pipe: Connection, engine_port: int, engine_token: str, key: str) -> None:
    """Tells its gRPC port."""
    os.nice(LEAST_PRIORITY)
    config = FrontendConfig(port=0, http_port=0, api_key=key)

    async def run() -> None:
        serving = asyncio.create_task(
            serve_frontend(
                config,
                [f"{HOST}:{engine_port}"],
                engine_token,
                lambda ports: pipe.send(ports.grpc),
            )
        )
        asking = asyncio.create_task(asyncio.to_thread(next_message, pipe))
        await asyncio.wait([serving, asking], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        await asyncio.wait([serving])

    asyncio.run(run())


class Open(NamedTuple):
    """Opens so many streams; answered once each has brought something."""

    rows: int


class Received(NamedTuple):
    """What came on all streams so far."""

    at: float  # seconds of `perf_counter`
    num_tokens: int
    num_messages: int


class CountReceived(NamedTuple):
    """Asks for what was received."""


class Leave(NamedTuple):
    """Closes all streams."""


def run_clients(pipe: Connection, port: int, key: str) -> None:
    """Answers `Open`, `CountReceived` and `Leave`."""
    os.nice(LEAST_PRIORITY)
    asyncio.run(_Clients(pipe, port, key).run())


class _Clients:
    def __init__(self, pipe: Connection, port: int, key: str) -> None:
        self._pipe = pipe
        self._port = port
        self._key = key
        self._num_tokens = 0
        self._num_messages = 0
        self._streams: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        async with grpc.aio.insecure_channel(f"{HOST}:{self._port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            self._pipe.send(None)
            while (message := await asyncio.to_thread(next_message, self._pipe)) is not None:
                match message:
                    case Open():
                        await self._open(stub, message.rows)
                        self._pipe.send(None)
                    case CountReceived():
                        now = perf_counter()
                        self._pipe.send(Received(now, self._num_tokens, self._num_messages))
                    case Leave():
                        await self._leave()
                        self._pipe.send(None)

    async def _open(self, stub: inference_pb2_grpc.InferenceStub, rows: int) -> None:
        begun = [asyncio.Event() for _ in range(rows)]
        self._streams = [
            asyncio.create_task(self._read(stub, row, each)) for row, each in enumerate(begun)
        ]
        together = asyncio.create_task(_all_set(begun))
        await asyncio.wait([together, *self._streams], return_when=asyncio.FIRST_COMPLETED)
        # A stream that fails is heard of at once.
        for stream in self._streams:
            if stream.done():
                stream.result()

    async def _read(
        self, stub: inference_pb2_grpc.InferenceStub, row: int, begun: asyncio.Event
    ) -> None:
        prompt = [1 + (row * PROMPT_TOKENS + place) % 251 for place in range(PROMPT_TOKENS)]
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=prompt),
            sampling_params=common_pb2.SamplingParams(
                max_tokens=MAX_MODEL_LEN - PROMPT_TOKENS, temperature=1.0
            ),
        )
        async for message in stub.Generate(request, metadata=bearer(self._key)):
            self._num_tokens += len(message.token_ids)
            self._num_messages += 1
            begun.set()
        raise RuntimeError("a stream has ended while it was measured")

    async def _leave(self) -> None:
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        self._streams = []


async def _all_set(events: Sequence[asyncio.Event]) -> None:
    for each in events:
        await each.wait()
