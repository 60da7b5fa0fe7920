"""The frontend's end of the engine's stream: queues, cancelled callers, a broken engine."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import grpc
import pytest

from protos import engine_pb2, engine_pb2_grpc
from runtime import engine_codec
from runtime.engine_service import EngineServer
from runtime.errors import InvalidRequestError, UnavailableError, WorkerError
from runtime.frontend.engine_client import EngineClient
from runtime.request import FinishReason, RequestFailure, RequestOutput
from tests.frontend import FakeEngine, added, ask, make_model
from tests.params import complete_params

pytestmark = pytest.mark.wire

TOKEN = "engine-token"
TIMEOUT_S = 30
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
PARAMS = complete_params(max_tokens=8)


class ScriptedEngine(engine_pb2_grpc.EngineServicer):
    """Sends what it's given, whatever it is, then waits for the end of the stream."""

    def __init__(self, messages: list[engine_pb2.EngineMessage]) -> None:
        self._messages = messages

    def Connect(self, request_iterator, context):
        ended = threading.Event()
        context.add_callback(ended.set)
        first, *rest = self._messages
        yield first
        next(request_iterator)
        yield from rest
        ended.wait(TIMEOUT_S)


@contextmanager
def scripted_engine(*messages: engine_pb2.EngineMessage) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    engine_pb2_grpc.add_EngineServicer_to_server(ScriptedEngine(list(messages)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=5).wait()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(make_model())


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    server = EngineServer(engine, TOKEN)
    server.start()
    yield f"127.0.0.1:{server.port}"
    server.stop(grace_s=5)


def test_steps_that_came_meanwhile_are_one_and_a_failure_comes_after_them(
    engine: FakeEngine, address: str
) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        outputs = ask(client, [3], PARAMS, seed=1)
        first = asyncio.ensure_future(anext(outputs))
        connection, request_id = await added(engine)
        connection.sink([RequestOutput(request_id, (5,))])
        assert await first == RequestOutput(request_id, (5,))
        for token in (6, 7, 8):
            connection.sink([RequestOutput(request_id, (token,))])
        connection.sink([RequestFailure(request_id, WorkerError("rank 1 is gone"))])
        await client.stats()  # comes after them on the stream
        assert await anext(outputs) == RequestOutput(request_id, (6, 7, 8))
        with pytest.raises(UnavailableError, match="rank 1 is gone"):
            await anext(outputs)
        await client.close()

    asyncio.run(main())


class FailingCall:
    """Fails at the moment when its reader is cancelled."""

    def __init__(self) -> None:
        self.is_read = asyncio.Event()

    async def read(self) -> None:
        self.is_read.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(UNAVAILABLE, nothing, nothing) from None

    def cancel(self) -> None:
        """Has failed by then."""


def test_who_is_cancelled_while_the_call_fails_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of both at once grpc tells the failure alone."""

    async def main() -> None:
        call = FailingCall()
        stub = SimpleNamespace(Connect=lambda *_, **__: call)
        monkeypatch.setattr(engine_pb2_grpc, "EngineStub", lambda _: stub)
        connecting = asyncio.create_task(EngineClient.connect("127.0.0.1:1", TOKEN))
        await call.is_read.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting

    asyncio.run(main())


def test_nothing_follows_the_finish(engine: FakeEngine, address: str) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        outputs = ask(client, [3], PARAMS, seed=1)
        first = asyncio.ensure_future(anext(outputs))
        connection, request_id = await added(engine)
        connection.sink([RequestOutput(request_id, (5,), FinishReason.LENGTH)])
        assert await first == RequestOutput(request_id, (5,), FinishReason.LENGTH)
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)
        await client.close()
        assert engine.aborted.empty()

    asyncio.run(main())


def test_closing_the_generator_aborts(engine: FakeEngine, address: str) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        async with aclosing(ask(client, [3], PARAMS, seed=1)) as outputs:
            first = asyncio.ensure_future(anext(outputs))
            connection, request_id = await added(engine)
            connection.sink([RequestOutput(request_id, (5,))])
            await first
        assert await asyncio.to_thread(engine.aborted.get, timeout=TIMEOUT_S) == request_id
        await client.close()

    asyncio.run(main())


def test_a_request_that_cannot_pass_is_refused_at_once(engine: FakeEngine, address: str) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        with pytest.raises(InvalidRequestError, match="token id 600 must be in"):
            ask(client, [600], PARAMS, seed=1)
        await client.close()

    asyncio.run(main())


def test_a_caller_that_left_does_not_shift_the_answers(engine: FakeEngine, address: str) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        leaving = asyncio.ensure_future(client.stats())
        await asyncio.sleep(0)  # let it ask
        leaving.cancel()
        assert await client.stats() == engine.stats()
        await client.close()
        assert leaving.cancelled()

    asyncio.run(main())


def test_who_asks_while_an_answer_is_under_way_gets_the_same(
    engine: FakeEngine, address: str
) -> None:
    answers = [replace(engine.stats(), num_steps=count) for count in range(3)]
    engine.stats = iter(answers).__next__

    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        assert await asyncio.gather(client.stats(), client.stats()) == [answers[0]] * 2
        assert await client.stats() == answers[1]
        await client.close()

    asyncio.run(main())


def test_a_late_answer_of_one_that_was_left_is_no_error(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        asking = asyncio.ensure_future(client.stats())
        await asyncio.sleep(0)  # let it ask
        client._fail("it is left")
        with pytest.raises(UnavailableError, match="it is left"):
            await asking
        await asyncio.wait([client._reader], timeout=TIMEOUT_S)
        await client.close()

    asyncio.run(main())
    assert not caplog.records


def test_close_fails_what_runs_and_what_comes(engine: FakeEngine, address: str) -> None:
    async def main() -> None:
        client = await EngineClient.connect(address, TOKEN)
        running = asyncio.ensure_future(anext(ask(client, [3], PARAMS, seed=1)))
        await added(engine)
        await client.close()
        await client.close()
        later = [running, client.stats(), anext(ask(client, [3], PARAMS, seed=1))]
        for call in later:
            with pytest.raises(UnavailableError, match="the frontend is stopping"):
                await call
        assert str(await client.wait_ended()) == "the frontend is stopping"

    asyncio.run(main())


def test_a_message_that_cannot_be_read_ends_the_connection() -> None:
    info = engine_pb2.EngineMessage(info=engine_codec.encode_info(make_model()))
    broken = engine_pb2.EngineMessage(outputs=engine_pb2.StepOutputs(request_ids=b"123"))

    async def main(address: str) -> None:
        client = await EngineClient.connect(address, TOKEN)
        with pytest.raises(UnavailableError, match="request_ids has 3 bytes"):
            await anext(ask(client, [3], PARAMS, seed=1))
        assert "request_ids has 3 bytes" in str(await client.wait_ended())
        await client.close()

    with scripted_engine(info, broken) as address:
        asyncio.run(main(address))


def test_an_engine_of_another_protocol_is_refused() -> None:
    async def main(address: str) -> None:
        with pytest.raises(UnavailableError, match="first message isn't EngineInfo"):
            await EngineClient.connect(address, TOKEN)

    with scripted_engine(engine_pb2.EngineMessage()) as address:
        asyncio.run(main(address))
