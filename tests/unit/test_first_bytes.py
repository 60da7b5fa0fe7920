"""Telling gRPC from HTTP by the first bytes."""

import pytest

from runtime.frontend.first_bytes import MAX_METHOD_BYTES, Speech, tell

pytestmark = pytest.mark.unit

HTTP1 = Speech.HTTP1


@pytest.mark.parametrize(
    ("head", "speech"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Speech.HTTP2),
        (b"PRI * HTTP/2.0", Speech.HTTP2),
        (b"\x16\x03\x01\x02\x00\x01", Speech.TLS),
        (b"GET / HTTP/1.1\r\n", HTTP1),
        (b"get / HTTP/1.1\r\n", HTTP1),
        (b"POST /v1/completions HTTP/1.1\r\n", HTTP1),
        (b"PRI * HTTP/1.1\r\n", HTTP1),
        (b"PRI x", HTTP1),
        (b"M-SEARCH * HTTP/1.1\r\n", HTTP1),
        (b" GET / HTTP/1.1", Speech.UNKNOWN),
        (b"\x80\x2e\x01", Speech.UNKNOWN),  # SSL 2
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", Speech.UNKNOWN),
        (b"\0", Speech.UNKNOWN),
        (b"G" * MAX_METHOD_BYTES, Speech.UNKNOWN),
    ],
)
def test_it_is_told_at_the_first_byte_that_tells(head: bytes, speech: Speech) -> None:
    seen = [tell(head[:length]) for length in range(len(head) + 1)]
    undecided = [each for each in seen if each is None]
    assert seen == undecided + [speech] * (len(seen) - len(undecided))
    assert len(undecided) <= MAX_METHOD_BYTES


def test_a_method_is_waited_for() -> None:
    assert tell(b"GET") is None
    assert tell(b"G" * (MAX_METHOD_BYTES - 1)) is None
