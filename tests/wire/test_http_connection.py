"""Clients that read slowly or leave, and a server that stops."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import Mock

import pytest
import uvicorn

from runtime.errors import ConfigError
from runtime.frontend.http_connection import Connection, ConnectionLimits, Connections
from runtime.frontend.http_refusal import Refusals
from runtime.frontend.public_socket import bind
from tests.http_serving import CHUNK, HOST, OPTION, TIMEOUT_S, App, RunningHttp, wire

pytestmark = pytest.mark.wire

SOON_S = 0.3


class FakeTransport(asyncio.Transport):
    """Says how much waits in it."""

    num_bytes = 0
    is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert (high, low) == (1, 0)

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.is_aborted = True


class FakeTimers:
    """What a connection needs of an event loop."""

    def __init__(self) -> None:
        self._set: list[tuple[float, Callable[[], object]]] = []

    def call_later(self, delay_s: float, do: Callable[..., object], *arguments: object) -> Mock:
        self._set.append((delay_s, partial(do, *arguments)))
        return Mock()

    def expire(self, delay_s: float) -> None:
        """Has the latest timer of this length end."""
        next(do for delay, do in reversed(self._set) if delay == delay_s)()


def has_ipv6() -> bool:
    try:
        bind("::1", 0, option=OPTION).close()
    except ConfigError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.fixture
def server() -> Iterator[RunningHttp]:
    with RunningHttp() as server:
        yield server


@pytest.mark.parametrize("system_helps", [False, True])
def test_a_reader_that_takes_nothing_is_cut_off_and_costs_little(system_helps: bool) -> None:
    with (
        RunningHttp(write_timeout_s=SOON_S, system_helps=system_helps) as server,
        wire(server) as client,
    ):
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        client.ask("/flood")
        assert server.app.ended.get(timeout=TIMEOUT_S) == "cancelled"
        # What the systems of both sides hold; loopback counts both ends' buffers.
        assert server.app.sent_bytes < 2 << 20
        assert len(client.read_to_end()) < 2 << 20


def test_a_reader_that_reads_is_not_cut_off() -> None:
    with RunningHttp(write_timeout_s=SOON_S) as server, wire(server) as client:
        client.ask("/flood")
        num_bytes = 0
        while num_bytes < 64 << 20:
            num_bytes += len(client.socket.recv(1 << 20))
        assert server.app.ended.empty()


def test_a_reader_that_takes_little_is_not_cut_off() -> None:
    transport, timers = FakeTransport(), FakeTimers()
    limits = ConnectionLimits(max_header_bytes=1024, read_timeout_s=1.0, write_timeout_s=5.0)
    config = uvicorn.Config(App(), lifespan="off", log_config=None)
    connection = Connection(config, Connections(), limits, Refusals([].append), timers)
    connection.connection_made(transport)
    transport.num_bytes = 100
    connection.pause_writing()
    transport.num_bytes = 99
    timers.expire(5.0)
    assert not transport.is_aborted
    timers.expire(5.0)
    assert transport.is_aborted


def test_what_waits_for_a_client_is_one_message(server: RunningHttp) -> None:
    with wire(server) as client:
        client.ask("/flood")
        server.app.begun.get(timeout=TIMEOUT_S)
        client.socket.recv(1)
        sizes = [size for _ in range(100) for size in server.call(server.buffer_sizes)]
        assert max(sizes) < len(CHUNK) + 100


def test_a_client_that_leaves_ends_the_work_for_it(server: RunningHttp) -> None:
    with wire(server) as client:
        client.ask("/hold", body=b"abc")
        assert server.app.begun.get(timeout=TIMEOUT_S) == "/hold"
    assert server.app.ended.get(timeout=TIMEOUT_S) == "cancelled"
    with wire(server) as client:
        client.ask("/flood")
        assert server.app.begun.get(timeout=TIMEOUT_S) == "/flood"
        client.socket.recv(1)
    assert server.app.ended.get(timeout=TIMEOUT_S) == "cancelled"


def test_a_client_that_leaves_amid_its_body_is_forgotten(server: RunningHttp) -> None:
    with wire(server) as client:
        client.ask("/v1", body=b"abc")
        client.read_answer()
        client.send(b"POST /v1 HTTP/1.1\r\nhost: test\r\ncontent-length: 10\r\n\r\nabc")
    server.stop(grace_s=TIMEOUT_S)
    assert server.app.begun.qsize() == 1


def test_work_after_an_answer_is_not_disturbed(server: RunningHttp) -> None:
    with wire(server) as client:
        client.ask("/linger")
        client.read_answer()
    server.wait_none_left()
    server.app.release(server)
    assert server.app.ended.get(timeout=TIMEOUT_S) == "done"


def test_a_server_that_stops_lets_requests_finish(server: RunningHttp) -> None:
    with wire(server) as client, wire(server) as idle, wire(server) as half:
        idle.ask("/")
        idle.read_answer()
        half.send(b"GET / HTT")
        client.ask("/hold")
        server.app.begun.get(timeout=TIMEOUT_S)
        server.app.begun.get(timeout=TIMEOUT_S)
        stopping = server.begin_stop(grace_s=TIMEOUT_S)
        assert idle.read_to_end() == b""
        assert half.read_to_end() == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, server.port), timeout=TIMEOUT_S)
        assert not stopping.done()
        server.app.release(server)
        assert client.read_answer().status == 200
        assert client.read_to_end() == b""
        stopping.result(TIMEOUT_S)


def test_a_server_that_stops_cuts_what_takes_too_long(server: RunningHttp) -> None:
    with wire(server) as client, wire(server) as reader:
        client.ask("/hold")
        assert server.app.begun.get(timeout=TIMEOUT_S) == "/hold"
        reader.ask("/flood")
        assert server.app.begun.get(timeout=TIMEOUT_S) == "/flood"
        server.stop(grace_s=SOON_S)
        assert [server.app.ended.get_nowait() for _ in range(2)] == ["cancelled"] * 2
        assert client.read_to_end() == b""


def test_an_app_that_fails_is_a_500_and_the_next_request_is_served(
    server: RunningHttp, caplog: pytest.LogCaptureFixture
) -> None:
    with wire(server) as client:
        client.ask("/fail")
        assert client.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 500")
    assert "Exception in ASGI application" in caplog.text
    with wire(server) as client:
        client.ask("/v1")
        assert client.read_answer().status == 200


@needs_ipv6
def test_ipv6_is_served() -> None:
    with RunningHttp(host="::1") as server, wire(server) as client:
        client.ask("/v1")
        assert client.read_answer().status == 200


@needs_ipv6
def test_all_of_ipv6_includes_ipv4() -> None:
    with RunningHttp(host="::") as server:
        server.host = HOST
        with wire(server) as client:
            client.ask("/v1")
            assert client.read_answer().status == 200


def test_a_port_that_is_taken_is_refused(server: RunningHttp) -> None:
    with pytest.raises(ConfigError, match=rf"can't listen at {HOST}:{server.port}: it is in use"):
        bind(HOST, server.port, option=OPTION)
    with pytest.raises(ConfigError, match=r"can't listen at \[2001:db8::1\]:0: .*--http-port"):
        bind("2001:db8::1", 0, option=OPTION)


def test_a_port_that_is_taken_after_it_was_bound_is_refused(server: RunningHttp) -> None:
    with bind(HOST, 0, option=OPTION) as one:
        port = one.getsockname()[1]
        with bind(HOST, port, option=OPTION) as other:
            one.listen()
            late = server.make_server(other)
            with pytest.raises(ConfigError, match=rf"can't listen at {HOST}:{port}: .*--http-port"):
                server.call(late.start)


def test_several_processes_share_a_port_if_all_of_them_want_to() -> None:
    with bind(HOST, 0, reuse_port=True, option=OPTION) as one:
        port = one.getsockname()[1]
        one.listen()
        with bind(HOST, port, reuse_port=True, option=OPTION) as other:
            assert other.getsockname() == one.getsockname()
            other.listen()
            with pytest.raises(ConfigError):
                bind(HOST, port, option=OPTION)
