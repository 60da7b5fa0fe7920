"""The frontend's end of one engine's stream: many requests on one connection.

Belongs to one event loop. A lost engine fails its requests; `engine_pool` goes on with them.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Self

import grpc
import grpc.aio

from protos import engine_pb2, engine_pb2_grpc
from protos.auth import bearer
from protos.tls import explain, open_aio_channel
from runtime import engine_codec
from runtime.errors import UnavailableError
from runtime.failure_codec import decode_failure
from runtime.frontend.inbox import Inbox
from runtime.request import EngineStats, ModelInfo, Request, RequestOutput
from runtime.stats_codec import decode_stats

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


class EngineClient:
    """A connected engine. Made by `connect`, ended by `close` or by the engine."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self.model: ModelInfo
        self.is_draining = False  # it takes no more requests
        self.why_not_ready: str | None = None  # requests wait there for workers
        self.on_readiness: Callable[[], object] = lambda: None
        self._channel = channel
        self._outbox: asyncio.Queue[engine_pb2.FrontendMessage | None] = asyncio.Queue()
        stub = engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
        self._call = stub.Connect(self._sent_messages(), metadata=bearer(token))
        self._request_ids = itertools.count(1)
        self._requests: dict[int, Inbox] = {}
        self._stats: asyncio.Future[EngineStats] | None = None  # those that are under way
        self._failure: str | None = None
        self._ended = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, address: str, token: str, credentials: grpc.ChannelCredentials | None = None
    ) -> Self:
        """By mutual TLS where there are `credentials`.

        Raises UnavailableError: nobody answers at `address`, or refuses token or certificate.
        """
        channel = open_aio_channel(address, CHANNEL_OPTIONS, credentials)
        client = cls(channel, token)
        try:
            await client._start()
        except UnavailableError as error:
            await client.close()
            raise UnavailableError(f"the engine at {address} can't be used: {error}") from error
        except asyncio.CancelledError:
            await client.close()
            raise
        return client

    def generate(self, request: Request) -> "Session":
        """What the engine brings for a request, which it gets when that is first asked for.

        The request gets an id of this connection's. Raises InvalidRequestError at once: the model
        can't serve it.
        """
        request.check(self.model)  # here too: the engine's thread needn't see what can't pass
        return Session(self, replace(request, request_id=next(self._request_ids)))

    @property
    def num_requests(self) -> int:
        """That the engine has now."""
        return len(self._requests)

    @property
    def is_usable(self) -> bool:
        """Whether it takes requests, as far as is known."""
        return self._failure is None and not self.is_draining

    async def stats(self) -> EngineStats:
        """Raises UnavailableError: the engine is gone."""
        self._check_running()
        if self._stats is None:  # an engine that hangs isn't asked again and again
            self._stats = asyncio.get_running_loop().create_future()
            self._send(engine_pb2.FrontendMessage(stats=engine_pb2.StatsRequest()))
        answer = self._stats
        await asyncio.wait([answer])  # shared: who is cancelled mustn't take it from the others
        return answer.result()

    async def wait_ended(self) -> UnavailableError:
        """Waits until the engine can't be used any more; returns why."""
        await self._ended.wait()
        return UnavailableError(self._failure)

    async def close(self, reason: str = "the frontend is stopping") -> None:
        """Fails what runs with `reason` and leaves the engine. May be called twice."""
        self._fail(reason)
        self._call.cancel()
        if self._reader is not None:
            await asyncio.wait([self._reader])
        await self._channel.close()

    def open(self, request: Request) -> Inbox:
        """Sends a request. Raises UnavailableError: the engine is gone."""
        self._check_running()
        inbox = self._requests[request.request_id] = Inbox(request.params.n)
        self._send(engine_pb2.FrontendMessage(add=engine_codec.encode_request(request)))
        return inbox

    def abort(self, request_id: int, choice: int | None = None) -> None:
        """Ends a request or one choice of it; what has ended already is left alone."""
        inbox = self._requests.get(request_id)
        if inbox is None:
            return
        if choice is not None:
            inbox.end(choice)
        if choice is None or inbox.is_complete:
            del self._requests[request_id]
        abort = engine_pb2.AbortRequest(request_id=request_id, index=choice)
        self._send(engine_pb2.FrontendMessage(abort=abort))

    async def _start(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            task = asyncio.current_task()
            # Cancelled just as the call failed: of both, grpc raises the failure alone.
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error
            raise UnavailableError(_describe(error)) from error
        except TimeoutError as error:
            raise UnavailableError(f"no answer within {CONNECT_TIMEOUT_S:g} s") from error
        if message is grpc.aio.EOF or message.WhichOneof("message") != "info":
            raise UnavailableError("its first message isn't EngineInfo")
        try:
            self.model = engine_codec.decode_info(message.info)
        except ValueError as error:
            raise UnavailableError(f"its EngineInfo can't be used: {error}") from error
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if self._failure is not None:  # those whom it is for have been told
                    return
                self._handle(message)
            self._fail("the engine ended the connection")
        except asyncio.CancelledError:  # our own `close` cancels the call
            self._fail("the connection to the engine was closed")
        except grpc.aio.AioRpcError as error:
            self._fail(f"the engine is gone: {_describe(error)}")
        except Exception as error:  # the edge of the task: nobody else would hear of it
            logger.exception("the engine's stream can't be read")
            self._fail(f"the engine's stream can't be read: {error}")
            self._call.cancel()

    def _handle(self, message: engine_pb2.EngineMessage) -> None:
        match message.WhichOneof("message"):
            case "outputs":
                for output in engine_codec.decode_outputs(message.outputs):
                    self._deliver(output)
            case "failed":
                failure = decode_failure(message.failed)
                inbox = self._requests.pop(failure.request_id, None)
                if inbox is not None:
                    inbox.fail(failure.error, was_refused=failure.was_refused)
            case "stats":
                if self._stats is None:
                    raise ValueError("stats have come that nobody has asked for")
                self._stats.set_result(decode_stats(message.stats))
                self._stats = None
            case "draining":
                self.is_draining = True
            case "readiness":
                is_ready = message.readiness.is_ready
                self.why_not_ready = None if is_ready else message.readiness.reason
                self.on_readiness()
            case other:
                raise ValueError(f"message of kind {other} is not expected here")

    def _deliver(self, output: RequestOutput) -> None:
        inbox = self._requests.get(output.request_id)
        if inbox is None:  # aborted, while this was under way
            return
        inbox.put(output)
        if inbox.is_complete:
            del self._requests[output.request_id]

    def _fail(self, reason: str) -> None:
        if self._failure is not None:
            return
        self._failure = reason
        for inbox in self._requests.values():
            inbox.fail(UnavailableError(reason))
        self._requests.clear()
        if self._stats is not None:
            self._stats.set_exception(UnavailableError(reason))
            self._stats.exception()  # seen, if nobody waits any more
            self._stats = None
        self._outbox.put_nowait(None)
        self._ended.set()

    def _check_running(self) -> None:
        if self._failure is not None:
            raise UnavailableError(self._failure)

    def _send(self, message: engine_pb2.FrontendMessage) -> None:
        self._outbox.put_nowait(message)

    async def _sent_messages(self) -> AsyncIterator[engine_pb2.FrontendMessage]:
        while (message := await self._outbox.get()) is not None:
            yield message


class Session:
    """New tokens of each choice as they come, and its finish reason with the last of them.

    Steps of a choice that came while the consumer was busy are joined. Closing it, or
    cancelling its consumer, aborts the request with all its choices.

    Iterating raises UnavailableError: the engine is gone; CapacityError and DeadlineError: the
    engine has no room, or no time; InvalidRequestError and ModelOutputError: there is nothing to
    sample.
    """

    def __init__(self, client: EngineClient, request: Request) -> None:
        self._client = client
        self._request = request
        self._inbox: Inbox | None = None
        self._is_closed = False

    @property
    def was_refused(self) -> bool:
        """Whether it has failed without ever being taken by the engine."""
        return self._inbox is None or self._inbox.was_refused

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_closed:
            raise StopAsyncIteration
        try:
            if self._inbox is None:
                self._inbox = self._client.open(self._request)
            output = await self._inbox.take()
        except BaseException:
            await self.aclose()
            raise
        if output is None:
            raise StopAsyncIteration
        return output

    def end(self, choice: int) -> None:
        """The client has all that it wants of a choice, of which nothing more comes."""
        self._client.abort(self._request.request_id, choice)

    async def aclose(self) -> None:
        """May be called twice."""
        self._is_closed = True
        if self._inbox is not None:
            self._client.abort(self._request.request_id)


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {explain(error.details() or '')}"
