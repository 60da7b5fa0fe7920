"""The public gRPC port: whom it passes on, what others hear, and what clients can do to it."""

import asyncio
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import pytest
import uvloop

from runtime.errors import ConfigError
from runtime.frontend.grpc_port import MAX_WAITING_BYTES, GrpcPort, PortLimits, private_folder
from runtime.frontend.http_refusal import Refusals
from runtime.frontend.public_socket import bind
from tests.http2 import PREFACE

pytestmark = pytest.mark.wire

HOST = "127.0.0.1"
TIMEOUT_S = 30
SOON_S = 0.3
NEVER_S = 2.0 * TIMEOUT_S
TOLD = "this is the gRPC port; HTTP is served on port 8000"
GET = b"GET / HTTP/1.1\r\nhost: here\r\n\r\n"
PART = b"x" * (16 << 10)
RESET_ON_CLOSE = struct.pack("ii", 1, 0)

Parameters = ParamSpec("Parameters")
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def on_a_loop(test: Callable[Parameters, Awaitable[None]]) -> Callable[Parameters, None]:
    @wraps(test)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        uvloop.run(asyncio.wait_for(test(*args, **kwargs), TIMEOUT_S))

    return run


class Port:
    """A port before a server that does nothing by itself."""

    def __init__(self, grpc_port: GrpcPort, address: tuple[str, int]) -> None:
        self.grpc_port = grpc_port
        self.address = address
        self.rejections: list[str] = []
        self.passed_on: asyncio.Queue[Ends] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, data: bytes = b"", *, buffer_bytes: int = 128 << 10) -> Ends:
        """A client whose system holds about so much for it."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client.connect(self.address)
        reader, writer = await asyncio.open_connection(sock=client)
        self._writers.append(writer)
        writer.write(data)
        return reader, writer

    def accept(self, *ends: Any) -> None:
        self._writers.append(ends[1])
        self.passed_on.put_nowait(ends)

    async def hang_up(self) -> None:
        """At both ends of all connections."""
        for writer in self._writers:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def ask(self, **options: Any) -> tuple[Ends, Ends]:
        """A client of HTTP/2, and what the server has of it, which has read the first bytes."""
        client = await self.connect(PREFACE, **options)
        server = await self.passed_on.get()
        assert await server[0].readexactly(len(PREFACE)) == PREFACE
        return client, server

    async def wait_none_left(self) -> None:
        await self.grpc_port._none_left.wait()


@asynccontextmanager
async def running(**changes: Any) -> AsyncIterator[Port]:
    limits: dict[str, Any] = {
        "max_connections": 8,
        "read_timeout_s": NEVER_S,
        "write_timeout_s": NEVER_S,
    }
    async with AsyncExitStack() as stack:
        path = stack.enter_context(private_folder()) / "socket"
        bound = bind(HOST, 0, option="--port")
        rejections: list[str] = []
        grpc_port = GrpcPort(
            bound,
            path,
            PortLimits(**limits | changes),
            Refusals(rejections.append),
            told=TOLD,
        )
        port = Port(grpc_port, bound.getsockname())
        port.rejections = rejections
        server = await asyncio.start_unix_server(port.accept, path)
        stack.callback(server.close)
        await grpc_port.start()
        try:
            yield port
        finally:
            grpc_port.close()
            await grpc_port.finish(0)
            await port.hang_up()


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


def reset(writer: asyncio.StreamWriter) -> None:
    known = writer.get_extra_info("socket")
    known.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    writer.transport.abort()


async def fill(writer: asyncio.StreamWriter) -> int:
    """Writes until nothing more is taken; returns how many bytes were."""
    count = 0
    try:
        while True:
            writer.write(PART)
            await asyncio.wait_for(writer.drain(), SOON_S)
            count += len(PART)
    except TimeoutError:
        return count


def message_in(answer: bytes) -> str:
    """Of a refusal that is complete."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    assert status == "HTTP/1.1 400 Bad Request"
    fields = dict(line.split(": ") for line in lines)
    assert fields["content-type"] == "application/json"
    assert fields["connection"] == "close"
    assert int(fields["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    return error["message"]


@pytest.mark.parametrize("half_closes", [False, True])
@pytest.mark.parametrize(
    "request_bytes",
    [
        GET,
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET ",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\ncontent-length: 4194304\r\n\r\n" + b"x" * (4 << 20),
    ],
)
@on_a_loop
async def test_http_is_answered_with_a_reason(request_bytes: bytes, half_closes: bool) -> None:
    async with running() as port:
        reader, writer = await port.connect(request_bytes)
        await writer.drain()  # all is sent before anything is read
        if half_closes:
            writer.write_eof()
        assert message_in(await reader.read()) == TOLD
        await hang_up(writer)
        await port.wait_none_left()
        assert port.rejections == ["invalid"]
        assert port.passed_on.empty()


@on_a_loop
async def test_a_client_of_http_that_never_hangs_up_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runtime.frontend.grpc_port.LINGER_S", SOON_S)
    async with running() as port:
        reader, writer = await port.connect(GET)
        await reader.read()
        await port.wait_none_left()
        await hang_up(writer)


@pytest.mark.parametrize("message", [PREFACE, GET, b"\x16\x03\x01"])
@on_a_loop
async def test_bytes_that_come_one_by_one_are_enough(message: bytes) -> None:
    async with running() as port:
        reader, writer = await port.connect()
        for place in range(len(message)):
            writer.write(message[place : place + 1])
            await asyncio.sleep(0)  # a turn of the loop, and a segment of its own
        if message == GET:
            assert message_in(await reader.read()) == TOLD
        else:
            server, _ = await port.passed_on.get()
            assert await server.readexactly(len(message)) == message
        await hang_up(writer)


@pytest.mark.parametrize("begins", [b"", b"P", b"PRI * HTTP/2", b"GET"])
@on_a_loop
async def test_a_client_that_does_not_say_what_it_speaks_is_cut_off(begins: bytes) -> None:
    async with running(read_timeout_s=SOON_S) as port:
        reader, writer = await port.connect(begins)
        assert await reader.read() == b""
        await hang_up(writer)
        assert port.rejections == []


@pytest.mark.parametrize("begins", [b"SSH-2.0-x\r\n", b"\0\0\0", b"G" * 100])
@on_a_loop
async def test_what_is_neither_http_nor_tls_is_cut_off(begins: bytes) -> None:
    async with running() as port:
        reader, writer = await port.connect(begins)
        assert await reader.read() == b""
        await hang_up(writer)


@on_a_loop
async def test_bytes_are_copied_both_ways_as_they_are() -> None:
    everything = bytes(range(256)) * 4096

    async def receive(ends: Ends) -> bytes:
        return await ends[0].readexactly(len(everything))

    async with running() as port:
        pairs = [await port.ask() for _ in range(4)]
        for ends in [end for pair in pairs for end in pair]:
            ends[1].write(everything)
        received = await asyncio.gather(*(receive(end) for pair in pairs for end in pair))
        assert received == [everything] * 8
        for client, _ in pairs:
            await hang_up(client[1])


@on_a_loop
async def test_a_client_that_stops_sending_still_gets_its_answer() -> None:
    async with running() as port:
        client, server = await port.ask()
        client[1].write(PART)
        client[1].write_eof()
        assert await server[0].read() == PART
        server[1].write(PART * 20)
        server[1].close()
        assert await client[0].read() == PART * 20
        await port.wait_none_left()
        await hang_up(client[1])


@on_a_loop
async def test_what_the_server_sent_last_arrives() -> None:
    async with running() as port:
        client, server = await port.ask(buffer_bytes=4096)
        (passed_on,) = port.grpc_port._clients
        shown = passed_on.transport.get_extra_info("socket")
        shown.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client[1].transport.pause_reading()
        last = PART[:1] * MAX_WAITING_BYTES
        server[1].write(last)
        server[1].close()
        while passed_on._server is not None:
            await asyncio.sleep(0)  # the test's timeout bounds them
        assert passed_on.transport.get_write_buffer_size() > 0
        client[1].write(PART)  # to nobody
        client[1].transport.resume_reading()
        assert await client[0].read() == last
        await hang_up(client[1])
        await port.wait_none_left()


@pytest.mark.parametrize("resets", [False, True])
@on_a_loop
async def test_a_client_that_leaves_is_gone_for_the_server(resets: bool) -> None:
    async with running() as port:
        client, server = await port.ask()
        if resets:
            reset(client[1])
        else:
            client[1].close()
        assert await server[0].read() == b""
        server[1].close()
        await port.wait_none_left()


@on_a_loop
async def test_a_client_that_leaves_with_its_first_bytes_leaves_nothing() -> None:
    async with running(max_connections=100) as port:
        for _ in range(50):
            _, writer = await port.connect(PREFACE)
            await writer.drain()
            reset(writer)
        await port.wait_none_left()
        await port.ask()


@on_a_loop
async def test_a_slow_reader_holds_up_the_server_and_is_cut_off() -> None:
    async with running(write_timeout_s=2 * SOON_S) as port:
        client, server = await port.ask()
        client[1].transport.pause_reading()
        server[1].write(PART * 1024)
        with pytest.raises(ConnectionError):
            await server[1].drain()
        await port.wait_none_left()
        reset(client[1])


@on_a_loop
async def test_neither_side_takes_more_than_the_other_reads() -> None:
    async with running() as port:
        client, server = await port.ask()
        (passed_on,) = port.grpc_port._clients
        for writer in (client[1], server[1]):
            writer.transport.pause_reading()
        sent = [await fill(client[1]), await fill(server[1])]
        for transport in (passed_on.transport, passed_on._server):
            assert transport.get_write_buffer_size() < MAX_WAITING_BYTES + (256 << 10)
        assert max(sent) < 16 << 20  # what systems hold, which is theirs to say
        for ends, count in zip((server, client), sent, strict=True):
            ends[1].transport.resume_reading()
            assert await ends[0].readexactly(count) == PART * (count // len(PART))
        reset(client[1])


@on_a_loop
async def test_a_client_that_keeps_what_the_server_has_closed_is_cut_off() -> None:
    async with running(write_timeout_s=SOON_S) as port:
        client, server = await port.ask()
        server[1].close()
        assert await client[0].read() == b""
        await port.wait_none_left()
        await hang_up(client[1])


@on_a_loop
async def test_connections_beyond_the_most_are_cut_off_until_some_have_ended() -> None:
    async with running(max_connections=2) as port:
        (_, silent), _ = await port.connect(), await port.ask()
        for surplus in [await port.connect(each) for each in (b"", PREFACE, GET)]:
            with suppress(ConnectionError):  # where it was cut off with bytes that nobody read
                assert await surplus[0].read() == b""
            surplus[1].transport.abort()
        assert port.rejections == ["overloaded"] * 3
        await hang_up(silent)
        while len(port.grpc_port._clients) > 1:
            await asyncio.sleep(0)  # the test's timeout bounds them
        await port.ask()


@on_a_loop
async def test_a_server_that_cannot_be_reached_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as port:
        port.grpc_port._path += "-elsewhere"
        reader, writer = await port.connect(PREFACE)
        assert await reader.read() == b""
        await hang_up(writer)
        await port.wait_none_left()
    assert "a connection can't be passed on to the gRPC server: " in caplog.text


@on_a_loop
async def test_a_port_that_closes_ends_who_is_new_and_lets_others_finish() -> None:
    async with running() as port:
        new = [await port.connect(begins) for begins in (b"", b"PR")]
        told = await port.connect(GET)
        assert await told[0].readexactly(8) == b"HTTP/1.1"
        client, server = await port.ask()
        while len(port.grpc_port._clients) < 4:
            await asyncio.sleep(0)
        port.grpc_port.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*port.address)
        for reader, writer in new:
            assert await reader.read() == b""
            await hang_up(writer)
        finish = asyncio.create_task(port.grpc_port.finish(TIMEOUT_S))
        server[1].write(PART)
        server[1].close()
        assert await client[0].read() == PART
        assert not finish.done()
        for _, writer in (client, told):
            await hang_up(writer)
        await finish


@on_a_loop
async def test_who_does_not_finish_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running() as port:
        client, server = await port.ask()
        port.grpc_port.close()
        await port.grpc_port.finish(SOON_S)
        assert await client[0].read() == b""
        assert await server[0].read() == b""
        server[1].close()
        await hang_up(client[1])
    assert "cuts 1 connections of the gRPC port" in caplog.text


@on_a_loop
async def test_a_port_that_is_taken_after_it_was_bound_is_told() -> None:
    with (
        closing(bind(HOST, 0, option="--port")) as one,
        closing(bind(HOST, one.getsockname()[1], option="--port")) as other,
    ):
        one.listen()
        limits = PortLimits(max_connections=1, read_timeout_s=1, write_timeout_s=1)
        port = GrpcPort(other, Path("nowhere"), limits, Refusals([].append), told=TOLD)
        with pytest.raises(ConfigError, match=r"can't listen at 127\.0\.0\.1:\d+.*--port or"):
            await port.start()
