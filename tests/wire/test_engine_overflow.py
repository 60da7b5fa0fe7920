"""A frontend that asks and doesn't read: the engine forgets it before it takes much memory."""

from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue

import grpc
import pytest

from protos import engine_pb2, engine_pb2_grpc
from protos.auth import bearer
from runtime import engine_codec
from runtime.engine_service import EngineServer, _Stream
from runtime.live_requests import Recipients, TokenBatch
from runtime.outbox import MAX_VALUES
from runtime.request import Request
from tests.frontend import FakeEngine, make_model
from tests.params import complete_params

pytestmark = pytest.mark.wire

TOKEN = "engine-token"
TIMEOUT_S = 30
STEP_TOKENS = MAX_VALUES // 8
NUM_STEPS = 32


def make_add() -> engine_pb2.FrontendMessage:
    request = Request(
        request_id=1, prompt_token_ids=[3], params=complete_params(max_tokens=7), seed=1
    )
    return engine_pb2.FrontendMessage(add=engine_codec.encode_request(request))


class Frontend:
    """Asks for a request at once, and reads when it is told to."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outbox: SimpleQueue[engine_pb2.FrontendMessage | None] = SimpleQueue()
        self._outbox.put(make_add())
        self.call = engine_pb2_grpc.EngineStub(channel).Connect(
            iter(self._outbox.get, None), metadata=bearer(TOKEN), timeout=TIMEOUT_S
        )
        assert next(self.call).WhichOneof("message") == "info"

    def read_all(self) -> Iterator[int]:
        """The token of each step, until the stream fails."""
        with suppress(grpc.RpcError):
            for message in self.call:
                yield engine_codec.decode_outputs(message.outputs)[0].token_ids[0]

    def leave(self) -> None:
        self._outbox.put(None)
        self.call.cancel()


def make_step(token: int) -> TokenBatch:
    zeros, ones = (0,) * STEP_TOKENS, (1,) * STEP_TOKENS
    return TokenBatch(Recipients(ones, zeros, zeros), (token,) * STEP_TOKENS, (None,) * STEP_TOKENS)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(make_model())


@pytest.fixture
def channel(engine: FakeEngine) -> Iterator[grpc.Channel]:
    server = EngineServer(engine, TOKEN)
    server.start()
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options) as channel:
        yield channel
    server.stop(grace_s=5)


def test_a_frontend_that_does_not_read_is_given_up(
    engine: FakeEngine, channel: grpc.Channel
) -> None:
    frontend = Frontend(channel)
    connection, _ = engine.added.get(timeout=TIMEOUT_S)
    for token in range(NUM_STEPS):  # none of them waits, whether anybody reads or not
        connection.sink(make_step(token))
    assert engine.closed.get(timeout=TIMEOUT_S) is connection
    read = list(frontend.read_all())
    assert frontend.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the frontend doesn't read" in frontend.call.details()
    # Of what it got, nothing is missing: it can go on from there.
    assert read == list(range(len(read)))
    assert len(read) < NUM_STEPS
    frontend.leave()
    # The engine is there for it as before.
    again = Frontend(channel)
    connection, _ = engine.added.get(timeout=TIMEOUT_S)
    connection.sink(make_step(5))
    assert next(again.read_all()) == 5
    again.leave()


def test_what_a_frontend_asks_for_after_that_is_not_begun(engine: FakeEngine) -> None:
    stream = _Stream(engine)
    stream.read(iter([make_add()]))
    connection, _ = engine.added.get(timeout=TIMEOUT_S)
    for token in range(NUM_STEPS):
        connection.sink(make_step(token))
    stream.read(iter([make_add()]))
    assert engine.added.empty()
