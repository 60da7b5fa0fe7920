"""The benchmarks' own clients, at servers of other makes."""

import asyncio
import json

import pytest

from benchmarks.clients import openai_client

pytestmark = pytest.mark.wire

EVENTS = [
    {"choices": [{"text": "a"}]},
    {"choices": [], "usage": {"completion_tokens": 1}},
]


async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Keeps the connection by its words, and closes it when the next request comes."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    await reader.readexactly(int(length.split(b":")[1]))
    body = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in EVENTS)
    body += b"data: [DONE]\n\n"
    kept = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: keep-alive\r\n\r\n"
    writer.write(kept.encode() + body)
    await writer.drain()
    await reader.read(1)  # the next request's, or the end
    writer.close()
    await writer.wait_closed()


def test_a_server_may_close_what_it_kept() -> None:
    async def ask() -> list[int]:
        calls: list[asyncio.Task[None]] = []

        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            calls.append(asyncio.get_running_loop().create_task(answer_once(reader, writer)))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            async with openai_client(f"http://127.0.0.1:{port}", model="m") as client:
                numbers = [(await client.complete([1, 2], 1)).num_tokens for _ in range(3)]
            await asyncio.gather(*calls)
        return numbers

    assert asyncio.run(ask()) == [1, 1, 1]
