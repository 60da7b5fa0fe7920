"""HTTP/2 by the byte, for clients of gRPC that misbehave."""

from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    *(0, 1, 3, 4, 6, 7),
    *(8, 9),
)
END_STREAM, END_HEADERS = 1, 4
ACK = 1

Pairs = Iterable[tuple[str, str]]


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def pack_headers(pairs: Pairs) -> bytes:
    """As HPACK's literals, which nobody keeps (RFC 7541, section 6.2.2)."""
    return b"".join(
        b"\0" + _text(name.encode("latin-1")) + _text(value.encode("latin-1"))
        for name, value in pairs
    )


def grpc_headers(method: str, key: str) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "here"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("authorization", f"Bearer {key}"),
    ]


def grpc_message(data: bytes, *, flag: int = 0) -> bytes:
    return bytes([flag]) + len(data).to_bytes(4, "big") + data


def grpc_call(method: str, key: str, message: bytes, *, stream: int = 1) -> bytes:
    """The frames of a call, which follow on PREFACE and settings."""
    headers = pack_headers(grpc_headers(method, key))
    return frame(HEADERS, headers, flags=END_HEADERS, stream=stream) + frame(
        DATA, grpc_message(message), flags=END_STREAM, stream=stream
    )


def greeting() -> bytes:
    return PREFACE + frame(SETTINGS)


def _text(data: bytes) -> bytes:
    """With its length, an integer of a prefix of seven bits (RFC 7541, section 5.1)."""
    length = len(data)
    if length < 127:
        return bytes([length]) + data
    rest, digits = length - 127, [127]
    while rest >= 128:
        digits.append(rest % 128 + 128)
        rest //= 128
    return bytes([*digits, rest]) + data
