"""What a client speaks, by the first bytes of its connection."""

import re
from enum import Enum, auto

PREFACE = b"PRI * HTTP/2.0"
# RFC 9110 has no shortest or longest method; longer ones than this are nobody's.
MAX_METHOD_BYTES = 32

_TLS_HANDSHAKE = 0x16
_HTTP1 = re.compile(rb"[A-Za-z-]+ ")
_METHOD = re.compile(rb"[A-Za-z-]+")


class Speech(Enum):
    HTTP1 = auto()
    HTTP2 = auto()
    TLS = auto()
    UNKNOWN = auto()


def tell(head: bytes) -> Speech | None:
    """None where more bytes are needed, of which it takes MAX_METHOD_BYTES at most."""
    if not head or PREFACE.startswith(head):
        return None
    if head.startswith(PREFACE):
        return Speech.HTTP2
    if head[0] == _TLS_HANDSHAKE:
        return Speech.TLS
    if _HTTP1.match(head):
        return Speech.HTTP1
    may_be_method = len(head) < MAX_METHOD_BYTES and _METHOD.fullmatch(head)
    return None if may_be_method else Speech.UNKNOWN
