"""More connections, and more bodies together, than a frontend may hold."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from runtime.errors import CapacityError
from runtime.frontend import http_connection
from runtime.frontend.body_space import BodySpace
from runtime.frontend.http_limits import MAX_STRANGER_BODY_BYTES
from tests.http_serving import KEY, MAX_BODY_BYTES, RunningHttp, Wire, wire

pytestmark = pytest.mark.wire

HEAD = f"POST /hold HTTP/1.1\r\nhost: test\r\nauthorization: Bearer {KEY}\r\n".encode()
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
# Two bodies of the longest kind.
ROOM = 2 * MAX_BODY_BYTES


@pytest.fixture
def server() -> Iterator[RunningHttp]:
    with RunningHttp(max_buffered_bytes=ROOM, max_connections=4) as server:
        yield server


def refusal_of(client: Wire) -> str:
    """What is told to who comes when there is no room, and may come again."""
    answer = client.read_answer()
    assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["connection"] == "close"
    message: str = answer.error["message"]
    return message


def test_bodies_together_are_limited_while_their_requests_run(server: RunningHttp) -> None:
    with wire(server) as first, wire(server) as second, wire(server) as third:
        for client in (first, second):
            client.ask("/hold", body=bytes(MAX_BODY_BYTES))
            server.app.wait_begun("/hold")
        third.ask("/hold", body=b"x")
        assert "max_buffered_bytes=131072" in refusal_of(third)
        server.app.release(server)
        assert first.read_answer().status == 200
        with wire(server) as fourth:
            fourth.ask("/v1", body=b"x")
            assert fourth.read_answer().status == 200
        server.app.release(server)
        assert second.read_answer().status == 200


def test_what_has_come_of_a_body_counts(server: RunningHttp) -> None:
    with wire(server) as held, wire(server) as slow, wire(server) as late:
        held.ask("/hold", body=bytes(MAX_BODY_BYTES))
        server.app.wait_begun("/hold")
        slow.send(CHUNKED + b"fff0\r\n" + bytes(0xFFF0) + b"\r\n")
        # Says that it is short, as far as it goes.
        late.send(CHUNKED + b"10\r\n" + bytes(0x10) + b"\r\n1\r\nx\r\n")
        assert "send this one again" in refusal_of(late)
        slow.send(b"0\r\n\r\n")
        server.app.wait_begun("/hold")
        for client in (held, slow):
            server.app.release(server)
            assert client.read_answer().status == 200


def test_clients_that_leave_give_their_room_back(server: RunningHttp) -> None:
    for _ in range(5):
        with wire(server) as client:
            client.ask("/hold", body=bytes(MAX_BODY_BYTES))
            server.app.wait_begun("/hold")
        server.app.wait_ended("cancelled")
        with wire(server) as client:
            client.send(CHUNKED + b"8000\r\n" + bytes(0x8000) + b"\r\n")
    server.wait_none_left()
    with wire(server) as client:
        client.ask("/v1", body=bytes(MAX_BODY_BYTES))
        assert client.read_answer().status == 200


def test_a_share_that_is_too_much_changes_nothing() -> None:
    space = BodySpace(10)
    with space.share() as one, space.share() as other:
        one.grow(6)
        with pytest.raises(CapacityError, match="max_buffered_bytes=10"):
            other.grow(5)
        other.grow(4)
        assert space.num_bytes == 10
    assert space.num_bytes == 0


def test_who_has_no_key_sends_next_to_nothing(server: RunningHttp) -> None:
    with wire(server) as stranger:
        stranger.ask("/health", key=None, body=bytes(MAX_STRANGER_BODY_BYTES))
        assert stranger.read_answer().status == 200
        stranger.ask("/health", key=None, body=bytes(MAX_STRANGER_BODY_BYTES + 1))
        answer = stranger.read_answer()
        assert answer.status == 413
        assert "without a key may have 1024 bytes" in answer.error["message"]


def test_connections_beyond_the_most_are_told_so(server: RunningHttp) -> None:
    with ExitStack() as stack:
        inside = [stack.enter_context(wire(server)) for _ in range(4)]
        for client in inside:
            client.ask("/v1")
            assert client.read_answer().status == 200
        with wire(server) as surplus:
            # Its answer is there whether it has asked yet or not.
            assert "max_connections=4 are open" in refusal_of(surplus)
            surplus.ask("/v1")
            surplus.socket.shutdown(1)
            assert surplus.read_to_end() == b""
        inside[0].ask("/v1")
        assert inside[0].read_answer().status == 200
    server.wait_none_left()
    with wire(server) as client:
        client.ask("/v1")
        assert client.read_answer().status == 200


def test_those_far_beyond_it_are_cut_off(
    server: RunningHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "MAX_TOLD", 2)
    with ExitStack() as stack:
        for client in [stack.enter_context(wire(server)) for _ in range(4)]:
            client.ask("/v1")
            assert client.read_answer().status == 200
        for told in [stack.enter_context(wire(server)) for _ in range(2)]:
            refusal_of(told)
        cut = stack.enter_context(wire(server))
        assert cut.read_to_end() == b""
