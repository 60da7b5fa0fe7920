"""What the HTTP server refuses is counted and named, and who may read it is asked."""

from collections.abc import Iterator

import pytest

from runtime.frontend.metrics import REJECTIONS
from tests.http_serving import KEY, MAX_BODY_BYTES, MAX_HEADER_BYTES, RunningHttp, Wire, wire

pytestmark = pytest.mark.wire

ORIGIN = "https://chat.example.org"
SOON_S = 0.2


@pytest.fixture(scope="module")
def server() -> Iterator[RunningHttp]:
    with RunningHttp() as server:
        yield server


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningHttp]:
    with RunningHttp(cors_origin=(ORIGIN,)) as server:
        yield server


def authorized(*lines: str) -> bytes:
    return "\r\n".join([*lines, "host: test", f"authorization: Bearer {KEY}", "", ""]).encode()


def ask_with(client: Wire, method: str, path: str, **headers: str) -> None:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    client.send("\r\n".join([f"{method} {path} HTTP/1.1", "host: test", *lines, "", ""]).encode())


@pytest.mark.parametrize(
    ("request_bytes", "status", "reason"),
    [
        (b"GET /v1 HTTP/1.1\r\nhost: test\r\n\r\n", 401, "unauthorized"),
        (
            authorized("POST /v1 HTTP/1.1", f"content-length: {MAX_BODY_BYTES + 1}"),
            413,
            "body_too_large",
        ),
        (
            b"GET /v1 HTTP/1.1\r\nhost: test\r\nx: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n",
            431,
            "header_too_large",
        ),
        (b"GET /v1 HTTP/1.1\r\nx: " + b"a" * 2 * MAX_HEADER_BYTES, 431, "header_too_large"),
        (b"nothing known\r\n\r\n", 400, "invalid"),
        (authorized("GET /v1 HTTP/1.0"), 200, None),
    ],
)
def test_what_is_refused_is_counted_by_its_reason(
    server: RunningHttp, request_bytes: bytes, status: int, reason: str | None
) -> None:
    server.rejections.clear()
    with wire(server) as client:
        client.send(request_bytes)
        assert client.read_answer().status == status
    assert server.rejections == ([] if reason is None else [reason])
    assert set(server.rejections) <= set(REJECTIONS)


@pytest.mark.parametrize(
    "begun", [b"GET /v1 HTTP/1.1\r\n", authorized("POST /v1 HTTP/1.1", "content-length: 9")]
)
def test_what_comes_too_slowly_is_counted(begun: bytes) -> None:
    with RunningHttp(read_timeout_s=SOON_S) as server, wire(server) as client:
        client.send(begun)
        assert client.read_answer().status == 408
        assert server.rejections == ["too_slow"]


def test_connections_and_bodies_for_which_there_is_no_room_are_counted() -> None:
    limits = {"max_connections": 2, "max_buffered_bytes": MAX_BODY_BYTES}
    with RunningHttp(**limits) as server, wire(server) as first, wire(server) as second:
        first.ask("/hold", body=bytes(MAX_BODY_BYTES))
        server.app.wait_begun("/hold")
        second.ask("/v1", body=b"x")
        assert second.read_answer().status == 429
        with wire(server) as third:
            assert third.read_answer().status == 429
        assert server.rejections == ["overloaded", "overloaded"]
        server.app.release(server)
        assert first.read_answer().status == 200


@pytest.mark.parametrize(
    ("asked", "is_kept"),
    [("order-42", True), ("a" * 128, True), ("a" * 129, False), ("sch\xf6n", False), ("", False)],
)
def test_every_answer_has_the_name_of_its_request(
    server: RunningHttp, asked: str, is_kept: bool
) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    for path, headers, status in (("/v1", key, 200), ("/health", {}, 200), ("/v1", {}, 401)):
        with wire(server) as client:
            lines = [f"{name}: {value}" for name, value in headers.items()]
            head = [f"GET {path} HTTP/1.1", "host: test", f"x-request-id: {asked}", *lines]
            client.send("\r\n".join([*head, "", ""]).encode("latin-1"))
            answer = client.read_answer()
            assert answer.status == status
            told = answer.headers["x-request-id"]
            assert (told == asked) == is_kept
            assert told.isascii()
            assert 1 <= len(told) <= 128


def test_pages_of_other_origins_get_nothing(server: RunningHttp) -> None:
    with wire(server) as client:
        ask_with(client, "OPTIONS", "/v1", origin=ORIGIN, access_control_request_method="POST")
        answer = client.read_answer()
        assert answer.status == 401
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_pages_of_an_origin_that_may_are_told_so_before_they_have_a_key(
    shared: RunningHttp,
) -> None:
    with wire(shared) as client:
        ask_with(
            client,
            "OPTIONS",
            "/v1",
            origin=ORIGIN,
            access_control_request_method="POST",
            access_control_request_headers="authorization,content-type,x-stainless-os",
        )
        answer = client.read_answer()
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "post" in answer.headers["access-control-allow-methods"]
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
    with wire(shared) as client:
        ask_with(client, "GET", "/v1", origin=ORIGIN)
        answer = client.read_answer()
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, ORIGIN)
    with wire(shared) as client:
        ask_with(client, "GET", "/v1", origin=ORIGIN, authorization=f"Bearer {KEY}")
        answer = client.read_answer()
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_pages_of_other_origins_than_those_that_may_get_nothing(shared: RunningHttp) -> None:
    other = "https://evil.example.org"
    with wire(shared) as client:
        ask_with(client, "OPTIONS", "/v1", origin=other, access_control_request_method="POST")
        answer = client.read_answer()
        assert answer.status == 400
        assert "access-control-allow-origin" not in answer.headers
    with wire(shared) as client:
        ask_with(client, "GET", "/v1", origin=other, authorization=f"Bearer {KEY}")
        assert "access-control-allow-origin" not in client.read_answer().headers


def test_asking_for_methods_without_an_origin_needs_a_key(shared: RunningHttp) -> None:
    with wire(shared) as client:
        ask_with(client, "OPTIONS", "/v1")
        assert client.read_answer().status == 401
