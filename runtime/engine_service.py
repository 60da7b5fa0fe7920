"""The engine's port: one stream per frontend, one message per step.

The engine's thread only appends to a stream's outbox; packing and sending happen on the stream's
own thread. The stream of a frontend that doesn't read is ended once too much waits for it: its
requests are aborted here, and it may resume them.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc

from protos import engine_pb2, engine_pb2_grpc
from protos.auth import TokenInterceptor
from protos.malformed import MalformedError, MalformedInterceptor
from protos.tls import add_port
from runtime import engine_codec
from runtime.engine import Engine
from runtime.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    LockstepError,
    UnavailableError,
)
from runtime.failure_codec import encode_failure
from runtime.live_requests import Outputs, TokenBatch
from runtime.outbox import Outbox, num_values_of
from runtime.request import EngineStats, RequestFailure, RequestOutput
from runtime.stats_codec import encode_stats

if TYPE_CHECKING:
    from runtime.connection import Connection

logger = logging.getLogger(__name__)

# Each holds two threads for as long as its stream is open.
MAX_FRONTENDS = 32
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Finds out that a frontend's host is gone.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class EngineServer:
    """Serves one engine to its frontends.

    By mutual TLS where there are `credentials`.
    Raises ConfigError: the port can't be bound. Raises ValueError: the token can't be sent.
    """

    def __init__(
        self,
        engine: Engine,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.token = token
        self._servicer = _Servicer(engine)
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_FRONTENDS, thread_name_prefix="engine-stream"),
            interceptors=[TokenInterceptor(token), MalformedInterceptor()],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_FRONTENDS,
        )
        engine_pb2_grpc.add_EngineServicer_to_server(self._servicer, self._server)  # type: ignore[no-untyped-call]
        try:
            self.port = add_port(self._server, f"{host}:{port}", credentials)
        except RuntimeError as error:
            raise ConfigError(f"the engine can't listen at {host}:{port}: {error}") from error

    def start(self) -> None:
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Ends each stream with UNAVAILABLE once what is queued for it is sent.

        Cuts those that take longer than `grace_s`. May be called twice.
        """
        self._servicer.stop()
        self._server.stop(grace_s).wait()


_Told = engine_pb2.EngineDraining | engine_pb2.EngineReadiness
_Item = Outputs | EngineStats | _Told | LockstepError | MalformedError


class _Servicer(engine_pb2_grpc.EngineServicer):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._streams: set[_Stream] = set()
        self._is_draining = False
        self._stopped = False
        engine.on_drain(self._drain)
        engine.on_readiness(self._tell_readiness)

    def Connect(
        self,
        request_iterator: Iterator[engine_pb2.FrontendMessage],
        context: grpc.ServicerContext,
    ) -> Iterator[engine_pb2.EngineMessage]:
        stream = _Stream(self._engine)
        with self._lock:
            if self._stopped:
                stream.end(UnavailableError("the engine is stopping"))
            if self._is_draining:
                stream.tell_draining()
            if (why_not := self._engine.why_not_ready) is not None:
                stream.tell_readiness(why_not)
            self._streams.add(stream)
        if not context.add_callback(lambda: self._close(stream)):
            self._close(stream)
            return
        threading.Thread(
            target=stream.read, args=(request_iterator,), name="engine-reader", daemon=True
        ).start()
        logger.info("a frontend connected from %s", context.peer())
        try:
            yield from stream.messages()
        except UnavailableError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except CapacityError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except InvalidRequestError as error:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for stream in self._streams:
                stream.end(UnavailableError("the engine is stopping"))

    def _drain(self) -> None:
        with self._lock:
            self._is_draining = True
            for stream in self._streams:
                stream.tell_draining()

    def _tell_readiness(self, why_not: str | None) -> None:
        with self._lock:
            for stream in self._streams:
                stream.tell_readiness(why_not)

    def _close(self, stream: "_Stream") -> None:
        with self._lock:
            self._streams.discard(stream)
        stream.close()


class _Stream:
    """One frontend's connection to the engine, and what waits to be sent to it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # None and errors end the stream.
        self._outbox: Outbox[_Item | None] = Outbox(on_overflow=self._give_up)
        self._connection: Connection = engine.connect(self._deliver)

    def read(self, messages: Iterator[engine_pb2.FrontendMessage]) -> None:
        """Passes on what the frontend sends, until it ends the stream or breaks it."""
        try:
            for message in messages:
                if self._outbox.has_overflowed:
                    return  # what it asks for now couldn't be answered
                self._handle(message)
            self.end(None)
        except (InvalidRequestError, MalformedError) as error:
            self.end(error)
        except grpc.RpcError:  # the stream is gone, which its callback handles
            self.end(None)
        except Exception as error:  # the edge of the thread: the stream must not stay deaf
            logger.exception("a frontend's messages can't be handled")
            self.end(UnavailableError(f"the engine failed: {type(error).__name__}: {error}"))

    def messages(self) -> Iterator[engine_pb2.EngineMessage]:
        """What the frontend gets, until the stream ends. Raises the error that ends it."""
        yield engine_pb2.EngineMessage(info=engine_codec.encode_info(self._engine.model))
        while (item := self._outbox.take()) is not None:
            match item:
                case LockstepError() | MalformedError():
                    raise item
                case EngineStats():
                    yield engine_pb2.EngineMessage(stats=encode_stats(item))
                case engine_pb2.EngineDraining():
                    yield engine_pb2.EngineMessage(draining=item)
                case engine_pb2.EngineReadiness():
                    yield engine_pb2.EngineMessage(readiness=item)
                case _:
                    yield from _encode(item)

    def end(self, error: LockstepError | MalformedError | None) -> None:
        """Ends the stream once what is queued is sent."""
        self._outbox.put(error)

    def tell_draining(self) -> None:
        self._outbox.put(engine_pb2.EngineDraining())

    def tell_readiness(self, why_not: str | None) -> None:
        self._outbox.put(engine_pb2.EngineReadiness(is_ready=why_not is None, reason=why_not or ""))

    def close(self) -> None:
        """The stream is over, whatever the reason."""
        self._connection.close()
        self._outbox.put(None)

    def _deliver(self, outputs: Outputs) -> None:
        self._outbox.put(outputs, num_values_of(outputs))

    def _give_up(self) -> None:
        logger.warning("a frontend doesn't read what it asked for: its requests are aborted")
        self._connection.close()

    def _handle(self, message: engine_pb2.FrontendMessage) -> None:
        match message.WhichOneof("message"):
            case "add":
                self._add(message.add)
            case "abort":
                abort = message.abort
                choice = abort.index if abort.HasField("index") else None
                self._connection.abort(abort.request_id, choice)
            case "stats":
                self._outbox.put(self._engine.stats())
            case _:
                raise InvalidRequestError(
                    "a frontend sent a message of a kind that this engine doesn't know: "
                    "engine and frontends must be of the same version"
                )

    def _add(self, message: engine_pb2.AddRequest) -> None:
        try:
            request = engine_codec.decode_request(message)
        except InvalidRequestError as error:
            self._deliver([RequestFailure(message.request_id, error)])
            return
        self._connection.add(request)


def _encode(outputs: Outputs) -> Iterator[engine_pb2.EngineMessage]:
    if isinstance(outputs, TokenBatch):
        yield engine_pb2.EngineMessage(outputs=engine_codec.encode_tokens(outputs))
        return
    tokens = [output for output in outputs if isinstance(output, RequestOutput)]
    if tokens:
        yield engine_pb2.EngineMessage(outputs=engine_codec.encode_outputs(tokens))
    for failure in outputs:
        if isinstance(failure, RequestFailure):
            yield engine_pb2.EngineMessage(failed=encode_failure(failure))
