"""Requests that are too long, too slow, or none at all."""

from collections.abc import Iterator

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.http_serving import (
    GRPC_PORT,
    KEY,
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    TENANT,
    TIMEOUT_S,
    RunningHttp,
    wire,
)

pytestmark = pytest.mark.wire

HEAD = f"POST /v1 HTTP/1.1\r\nhost: test\r\nauthorization: Bearer {KEY}\r\n".encode()
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
SOON_S = 0.2


@pytest.fixture(scope="module")
def server() -> Iterator[RunningHttp]:
    with RunningHttp() as server:
        yield server


@pytest.fixture(scope="module")
def hasty() -> Iterator[RunningHttp]:
    with RunningHttp(read_timeout_s=SOON_S) as server:
        yield server


def test_a_request_reaches_the_app_whole_and_a_connection_serves_several(
    server: RunningHttp,
) -> None:
    with wire(server) as client:
        for num_bytes in (0, 7, MAX_BODY_BYTES):
            client.ask("/v1", body=bytes(num_bytes))
            answer = client.read_answer()
            assert answer.status == 200
            told = b'{"path": "/v1", "tenant": "%s", "num_bytes": %d}'
            assert answer.body == told % (TENANT.encode(), num_bytes)
            assert answer.headers.keys() == {"content-length", "x-request-id"}


def test_pipelined_requests_are_answered_in_order(server: RunningHttp) -> None:
    with wire(server) as client:
        client.send(HEAD + b"content-length: 3\r\n\r\nabc" + HEAD + b"content-length: 1\r\n\r\nd")
        assert b'"num_bytes": 3' in client.read_answer().body
        assert b'"num_bytes": 1' in client.read_answer().body


def test_a_client_that_asks_first_is_told_to_send_its_body(server: RunningHttp) -> None:
    with wire(server) as client:
        client.send(HEAD + b"expect: 100-continue\r\ncontent-length: 3\r\n\r\n")
        assert client.read_answer().status == 100
        client.send(b"abc")
        assert client.read_answer().status == 200


def test_a_body_that_says_it_is_too_long_is_refused_before_it_is_sent(server: RunningHttp) -> None:
    with wire(server) as client:
        client.send(HEAD + b"expect: 100-continue\r\ncontent-length: 65537\r\n\r\n")
        answer = client.read_answer()
        assert answer.status == 413
        assert answer.headers["connection"] == "close"
        assert answer.error == {
            "message": "the body of the request is longer than max_body_bytes=65536: send less at "
            "once",
            "type": "invalid_request_error",
            "param": None,
            "code": "request_too_large",
        }


def test_a_body_that_grows_too_long_is_refused(server: RunningHttp) -> None:
    with wire(server) as client:
        client.send(CHUNKED)
        for _ in range(MAX_BODY_BYTES // 4096):
            client.send(b"1000\r\n" + bytes(4096) + b"\r\n")
        client.send(b"1\r\n.\r\n")
        assert client.read_answer().status == 413


def test_who_sends_a_long_body_in_one_go_can_still_read_the_refusal(server: RunningHttp) -> None:
    with wire(server) as client:
        client.ask("/v1", body=bytes(16 << 20))
        assert client.read_answer().status == 413
        assert client.read_to_end() == b""


def test_a_body_that_stops_coming_is_refused(hasty: RunningHttp) -> None:
    with wire(hasty) as client:
        client.send(HEAD + b"content-length: 10\r\n\r\nabc")
        answer = client.read_answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert "didn't arrive within 0.2 s" in answer.error["message"]
    assert hasty.app.begun.empty()


def test_a_head_that_stops_coming_is_refused(hasty: RunningHttp) -> None:
    with wire(hasty) as client:
        client.send(HEAD)
        answer = client.read_answer()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert client.read_to_end() == b""


def test_a_head_that_drips_in_is_refused_all_the_same(hasty: RunningHttp) -> None:
    with wire(hasty) as client:
        client.socket.settimeout(SOON_S / 10)
        client.send(b"GET / HTTP/1.1\r\nx: ")
        for _ in range(10 * 100):
            try:
                answered = client.socket.recv(12)
                break
            except TimeoutError:
                client.send(b"x")
        assert answered == b"HTTP/1.1 408"


def test_who_says_nothing_is_cut_off(hasty: RunningHttp) -> None:
    with wire(hasty) as client:
        assert client.read_to_end() == b""


def test_a_served_connection_may_idle_longer_than_a_head_may_take(hasty: RunningHttp) -> None:
    with wire(hasty) as idle, wire(hasty) as silent:
        idle.ask("/")
        assert idle.read_answer().status == 200
        assert silent.read_to_end() == b""  # its time is over
        idle.ask("/")
        assert idle.read_answer().status == 200
        idle.send(b"GET")
        assert idle.read_answer().status == 408


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nhost: test\r\nx: " + b"x" * (16 << 20),
        b"GET / HTTP/1.1\r\nhost: test\r\nx: " + b"x" * MAX_HEADER_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: test\r\n" + b"x: y\r\n" * MAX_HEADER_BYTES + b"\r\n",
        b"GET /" + b"x" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nhost: test\r\n\r\n",
        b"GET /?" + b"x" * MAX_HEADER_BYTES + b" HTTP/1.1\r\nhost: test\r\n\r\n",
        b"x" * (64 << 10),
    ],
    ids=["endless", "long", "many", "path", "query", "no line"],
)
def test_a_head_that_is_too_long_is_refused(server: RunningHttp, head: bytes) -> None:
    with wire(server) as client:
        client.send(head)
        answer = client.read_answer()
        assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
        assert f"max_header_bytes={MAX_HEADER_BYTES}" in answer.error["message"]
        assert client.read_to_end() == b""


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: test\r\nbad header\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: " + b"9" * 30 + b"\r\n\r\n",
        HEAD + b"transfer-encoding: gzip\r\n\r\n",
        CHUNKED + b"zz\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: RunningHttp, junk: bytes) -> None:
    with wire(server) as client:
        client.send(junk)
        answer = client.read_answer()
        assert answer.status in (400, 501)
        assert answer.error["message"].startswith("this is no HTTP/1.1 request: ")
        assert client.read_to_end() == b""


def test_junk_after_a_request_leaves_its_answer_whole(server: RunningHttp) -> None:
    with wire(server) as client:
        client.send(HEAD + b"content-length: 3\r\n\r\nabc" + b"junk\r\n\r\n")
        assert client.read_answer().status == 200
        assert client.read_answer().status == 400
        assert client.read_to_end() == b""


def test_junk_after_the_last_request_of_a_connection_ends_it(server: RunningHttp) -> None:
    with wire(server) as client:
        client.send(b"GET /hold HTTP/1.1\r\nhost: test\r\nconnection: close\r\n")
        client.send(f"authorization: Bearer {KEY}\r\n\r\n".encode())
        server.app.wait_begun("/hold")
        client.send(b"junk")
        assert client.read_answer().status == 400
        assert client.read_to_end() == b""
        server.app.wait_ended("cancelled")


def test_junk_after_a_request_that_was_refused_hurts_nothing(
    server: RunningHttp, caplog: pytest.LogCaptureFixture
) -> None:
    with wire(server) as client:
        client.send(b"POST /v1 HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n")
        assert client.read_answer().status == 401
        client.send(b"zz\r\n")
        assert client.read_to_end() == b""
    assert not caplog.records
    with wire(server) as client:
        client.ask("/v1")
        assert client.read_answer().status == 200


def test_grpc_at_the_http_port_is_told_the_right_one(server: RunningHttp) -> None:
    with wire(server) as client:
        client.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        answer = client.read_answer()
        assert answer.status == 400
        assert answer.error["message"] == (
            f"this is the HTTP port; gRPC is served on port {GRPC_PORT}"
        )


def test_a_grpc_client_at_the_http_port_sees_what_it_is(server: RunningHttp) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.Generate(inference_pb2.GenerateRequest(), timeout=TIMEOUT_S))
    assert "Trying to connect an http1.x server (HTTP status 400)" in caught.value.details()
