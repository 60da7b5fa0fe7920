"""The public gRPC service behind somebody else's gRPC server, which hands it messages.

That server has the port, its TLS and its limits; keys are asked for here.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import NoReturn, Protocol, TypeVar

import grpc

from protos import inference_pb2
from protos.auth import KeyRing, Metadata
from runtime.frontend.grpc_service import CallContext, InferenceService

NO_KEY = "this call needs the metadata `authorization: Bearer KEY` with a key of this server"


class Message(Protocol):
    """Of protobuf."""

    def ByteSize(self) -> int: ...


Asked = TypeVar("Asked", bound=Message)
Answer = TypeVar("Answer")


class CallFailedError(Exception):
    """How a call ends that doesn't end well."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class RelayedCalls:
    """Calls of one frontend's service, by the messages and the metadata that have come."""

    def __init__(self, service: InferenceService, keys: KeyRing, *, max_message_bytes: int) -> None:
        self.service = service
        self._keys = keys
        self._max_message_bytes = max_message_bytes

    async def answer(
        self,
        method: Callable[[Asked, CallContext], Awaitable[Answer]],
        request: Asked,
        metadata: Sequence[tuple[str, str]],
    ) -> Answer:
        """By one of the service's methods that answer once. Raises CallFailedError."""
        self._check(request, metadata)
        return await method(request, _Context(metadata))

    async def generate(
        self, request: inference_pb2.GenerateRequest, metadata: Sequence[tuple[str, str]]
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Closed, or its consumer cancelled, it ends the request. Raises CallFailedError."""
        self._check(request, metadata)
        context = _Context(metadata)
        call = asyncio.create_task(self._generate(request, context))
        try:
            while (message := await context.written.get()) is not None:
                yield message
            await call
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _generate(self, request: inference_pb2.GenerateRequest, context: "_Context") -> None:
        try:
            await self.service.Generate(request, context)
        except Exception:  # for the reader, who is told that there is no more
            await context.written.put(None)
            raise
        await context.written.put(None)

    def _check(self, request: Message, metadata: Sequence[tuple[str, str]]) -> None:
        if self._keys.name_of(metadata) is None:
            raise CallFailedError(grpc.StatusCode.UNAUTHENTICATED, NO_KEY)
        if (num_bytes := request.ByteSize()) > self._max_message_bytes:
            raise CallFailedError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the message has {num_bytes} bytes: more than "
                f"max_body_bytes={self._max_message_bytes}",
            )


class _Context:
    """One call, as the service knows it."""

    def __init__(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = metadata
        # One at a time: who reads slowly is waited for. None is the end.
        self.written: asyncio.Queue[inference_pb2.GenerateResponse | None] = asyncio.Queue(1)

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def time_remaining(self) -> None:
        """Not known: who has the port cancels the call when its time is over."""

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        await self.written.put(message)

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: Metadata = ()
    ) -> NoReturn:
        raise CallFailedError(code, details)
