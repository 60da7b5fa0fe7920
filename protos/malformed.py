"""Messages that can't be read, for both kinds of gRPC server.

Their calls end with INVALID_ARGUMENT. gRPC alone would log a traceback of each, and tell the
caller that the server has failed.
"""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class MalformedError(Exception):
    """A message isn't of the type that its method takes."""


class MalformedInterceptor(grpc.ServerInterceptor):
    """For `grpc.server`, after TokenInterceptor.

    A stream of requests raises MalformedError where it is read; its method lets that pass.
    """

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        return _remake(handler, _answer_all if handler.request_streaming else _answer_one)


class AioMalformedInterceptor(grpc.aio.ServerInterceptor):
    """For `grpc.aio.server`, after AioTokenInterceptor; as MalformedInterceptor."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _remake(handler, _aio_answer_all if handler.request_streaming else _aio_answer_one)


def _remake(handler: Any, wrap: Callable[[Any], Any]) -> grpc.RpcMethodHandler:
    """The handler, with its method wrapped; where a message can't be read that gets the error."""
    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    methods = (
        *(handler.unary_unary, handler.unary_stream),
        *(handler.stream_unary, handler.stream_stream),
    )
    (method,) = filter(None, methods)
    return make(
        wrap(method),
        request_deserializer=_reader(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )


def _reader(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return MalformedError(f"the message of {len(data)} bytes can't be read: {error}")

    return read


# gRPC's own services carry their options as attributes of their methods, and may get a third
# argument by them.
def _answer_one(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def answer(request: Any, context: grpc.ServicerContext, *others: Any) -> Any:
        if isinstance(request, MalformedError):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
        return method(request, context, *others)

    return answer


def _answer_all(method: Callable[..., Any]) -> Callable[..., Any]:
    def answer(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from method(_readable(requests), context)
        except MalformedError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return answer


def _readable(requests: Iterator[Any]) -> Iterator[Any]:
    for request in requests:
        if isinstance(request, MalformedError):
            raise request
        yield request


def _aio_answer_one(method: Callable[..., Any]) -> Callable[..., Any]:
    async def answer(request: Any, context: Any) -> Any:
        if isinstance(request, MalformedError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
        return await method(request, context)

    return answer


def _aio_answer_all(method: Callable[..., Any]) -> Callable[..., Any]:
    async def answer(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            async for response in method(_aio_readable(requests), context):
                yield response
        except MalformedError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return answer


async def _aio_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, MalformedError):
            raise request
        yield request
