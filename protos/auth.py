"""The bearer tokens that every port of ours asks for, for both kinds of gRPC server.

A call without the metadata `authorization: Bearer <token>` is refused with UNAUTHENTICATED, before
any of its messages is read.
"""

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import grpc
import grpc.aio

HEADER = "authorization"
_SCHEME = "Bearer "
_DIGEST_BYTES = 32

Metadata = tuple[tuple[str, str], ...]


def bearer(token: str) -> Metadata:
    """The metadata that a client sends with each call.

    Raises ValueError: the token isn't printable ASCII, which gRPC could not send.
    """
    _check(token)
    return ((HEADER, f"{_SCHEME}{token}"),)


def digest(token: str) -> bytes:
    """What is kept of a token: its SHA-256. Raises ValueError as `bearer`."""
    _check(token)
    return _digest(token.encode())


class KeyRing:
    """Several tokens, each of somebody with a name. It keeps their digests alone.

    Raises ValueError: there is none, or one isn't a digest.
    """

    def __init__(self, names: Mapping[bytes, str]) -> None:
        """`names` by the digests of their tokens: a name may have several."""
        if not names:
            raise ValueError("there is no token: nobody could call")
        if any(not isinstance(each, bytes) or len(each) != _DIGEST_BYTES for each in names):
            raise ValueError("a token is given as such: must be its digest")
        self._names = tuple(names.items())

    @classmethod
    def of_tokens(cls, names: Mapping[str, str]) -> Self:
        """`names` by their tokens. Raises ValueError also where a token can't be sent."""
        return cls({digest(token): name for token, name in names.items()})

    def name_of(self, metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
        """Whose token a call carries; None where it is nobody's."""
        found = None
        for key, value in metadata:
            if key != HEADER or not isinstance(value, str) or not value.startswith(_SCHEME):
                continue
            name = self.name_of_token(value.removeprefix(_SCHEME))
            found = found if name is None else name
        return found

    def name_of_token(self, token: str) -> str | None:
        """As `name_of`, of a token that a request of another kind carries."""
        sent = _digest(token.encode(errors="surrogateescape"))
        found = None
        for expected, name in self._names:  # to the end: how long it takes tells nothing
            if hmac.compare_digest(sent, expected):
                found = name
        return found


class TokenInterceptor(grpc.ServerInterceptor):
    """For `grpc.server`. Calls under a prefix in `exempt`, as `/grpc.health.v1.Health/`, pass.

    Raises ValueError: the token is empty or can't be sent.
    """

    def __init__(self, token: str, exempt: frozenset[str] = frozenset()) -> None:
        self._gate = _Gate(KeyRing.of_tokens({token: ""}), exempt)
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        if self._gate.admits(handler_call_details):
            return continuation(handler_call_details)
        return self._refusal


class AioTokenInterceptor(grpc.aio.ServerInterceptor):
    """For `grpc.aio.server`; as TokenInterceptor, with any token of `keys`."""

    def __init__(self, keys: KeyRing, exempt: frozenset[str] = frozenset()) -> None:
        self._gate = _Gate(keys, exempt)
        self._refusal = grpc.stream_stream_rpc_method_handler(_aio_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if self._gate.admits(handler_call_details):
            return await continuation(handler_call_details)
        return self._refusal


class _Gate:
    def __init__(self, keys: KeyRing, exempt: frozenset[str]) -> None:
        self._keys = keys
        self._exempt = tuple(exempt)

    def admits(self, call: grpc.HandlerCallDetails) -> bool:
        if self._exempt and call.method.startswith(self._exempt):
            return True
        return self._keys.name_of(call.invocation_metadata) is not None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _check(token: str) -> None:
    if not token:
        raise ValueError("token is empty: a port without a token would be open to everyone")
    if not (token.isascii() and token.isprintable()) or token != token.strip():
        raise ValueError("token must be printable ASCII without space at its ends")


_MESSAGE = "this call needs the metadata `authorization: Bearer <token>` with the right token"


# A stream handler for calls of every kind: a unary handler would first wait for the caller's
# message, and a stranger who never sends one would hold a thread of the server.
def _refuse(requests: Iterator[Any], context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, _MESSAGE)


async def _aio_refuse(requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _MESSAGE)
