"""The engine's port: one message per step, and what it does with what it can't read."""

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import grpc
import pytest

from protos import engine_pb2, engine_pb2_grpc
from protos.auth import bearer
from runtime import engine_codec
from runtime.engine_service import EngineServer
from runtime.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    LockstepError,
    WorkerError,
)
from runtime.failure_codec import decode_failure
from runtime.request import FinishReason, Request, RequestFailure, RequestOutput
from runtime.stats_codec import decode_stats
from tests.frontend import FakeEngine, make_model
from tests.params import complete_params

pytestmark = pytest.mark.wire

TOKEN = "engine-token"
TIMEOUT_S = 30


class Frontend:
    """A frontend by hand: sends what it's told, reads message by message."""

    def __init__(self, channel: grpc.Channel, token: str = TOKEN) -> None:
        self._outbox: SimpleQueue[engine_pb2.FrontendMessage | None] = SimpleQueue()
        self.call = engine_pb2_grpc.EngineStub(channel).Connect(
            iter(self._outbox.get, None), metadata=bearer(token), timeout=TIMEOUT_S
        )

    def send(self, **message: object) -> None:
        self._outbox.put(engine_pb2.FrontendMessage(**message))

    def half_close(self) -> None:
        self._outbox.put(None)

    def read(self) -> engine_pb2.EngineMessage:
        return next(self.call)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(make_model("/models/tiny"))


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[EngineServer]:
    server = EngineServer(engine, TOKEN)
    server.start()
    yield server
    server.stop(grace_s=5)


@pytest.fixture
def channel(server: EngineServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


@pytest.fixture
def frontend(channel: grpc.Channel) -> Frontend:
    frontend = Frontend(channel)
    assert frontend.read().WhichOneof("message") == "info"
    return frontend


def make_add(request_id: int, prompt: list[int] | None = None) -> engine_pb2.AddRequest:
    return engine_codec.encode_request(
        Request(
            request_id=request_id,
            prompt_token_ids=prompt or [3, 4, 5],
            params=complete_params(max_tokens=7, temperature=0.5, top_k=3, top_p=0.9),
            seed=2**64 - 1,
            tenant="acme",
            timeout_s=2.5,
        )
    )


def test_the_first_message_tells_what_is_served(engine: FakeEngine, channel: grpc.Channel) -> None:
    info = Frontend(channel).read().info
    assert engine_codec.decode_info(info) == engine.model


def test_requests_and_aborts_reach_the_engine(engine: FakeEngine, frontend: Frontend) -> None:
    frontend.send(add=make_add(2**64 - 1, [3, 2**31 - 1]))
    frontend.send(abort=engine_pb2.AbortRequest(request_id=9))
    frontend.send(abort=engine_pb2.AbortRequest(request_id=9, index=0))
    _, request = engine.added.get(timeout=TIMEOUT_S)
    assert request == Request(
        request_id=2**64 - 1,
        prompt_token_ids=[3, 2**31 - 1],
        params=complete_params(max_tokens=7, temperature=0.5, top_k=3, top_p=0.9, seed=2**64 - 1),
        seed=2**64 - 1,
        tenant="acme",
        timeout_s=2.5,
    )
    assert [engine.aborted.get(timeout=TIMEOUT_S) for _ in range(2)] == [9, (9, 0)]


def test_a_step_is_one_message_however_many_requests_got_tokens(
    engine: FakeEngine, frontend: Frontend
) -> None:
    for request_id in range(1, 65):
        frontend.send(add=make_add(request_id))
    connections = {engine.added.get(timeout=TIMEOUT_S)[0] for _ in range(64)}
    (connection,) = connections
    steps = [
        [RequestOutput(request_id, (step, request_id)) for request_id in range(1, 65)]
        for step in range(5)
    ]
    for outputs in steps:
        connection.sink(outputs)
    messages = [frontend.read() for _ in steps]
    assert [engine_codec.decode_outputs(message.outputs) for message in messages] == steps


def test_outputs_are_packed_in_columns(engine: FakeEngine, frontend: Frontend) -> None:
    frontend.send(add=make_add(1))
    connection, _ = engine.added.get(timeout=TIMEOUT_S)
    connection.sink(
        [
            RequestOutput(258, (1, 2, 70000), num_cached_tokens=32),
            RequestOutput(3, ()),
            RequestOutput(258, (9,), FinishReason.LENGTH, choice=1, num_cached_tokens=32),
        ]
    )
    outputs = frontend.read().outputs
    assert outputs.request_ids == b"".join(i.to_bytes(8, "little") for i in (258, 3, 258))
    assert outputs.num_tokens == b"".join(i.to_bytes(4, "little") for i in (3, 0, 1))
    assert outputs.token_ids == b"".join(i.to_bytes(4, "little") for i in (1, 2, 70000, 9))
    assert outputs.finish_reasons == bytes([0, 0, 2])
    assert outputs.indices == b"".join(i.to_bytes(4, "little") for i in (0, 0, 1))
    assert outputs.num_cached_tokens == b"".join(i.to_bytes(4, "little") for i in (32, 0, 32))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("too long"), "KIND_INVALID"),
        (CapacityError("full", retry_after_s=1.5), "KIND_CAPACITY"),
        (DeadlineError("too late"), "KIND_DEADLINE"),
        (WorkerError("rank 1 is gone"), "KIND_UNAVAILABLE"),
        (LockstepError("a bug"), "KIND_INTERNAL"),
    ],
)
def test_failures_carry_their_kind(
    engine: FakeEngine, frontend: Frontend, error: LockstepError, kind: str
) -> None:
    frontend.send(add=make_add(1))
    connection, _ = engine.added.get(timeout=TIMEOUT_S)
    connection.sink([RequestOutput(2, (8,)), RequestFailure(1, error)])
    assert frontend.read().WhichOneof("message") == "outputs"
    failed = frontend.read().failed
    assert (failed.request_id, failed.message) == (1, str(error))
    assert engine_pb2.RequestFailed.Kind.Name(failed.kind) == kind
    decoded = decode_failure(failed).error
    assert type(decoded) in type(error).__mro__
    # Whose fault it was is the engine's business.
    assert vars(decoded) == {k: v for k, v in vars(error).items() if k != "is_outside"}


def test_stats_are_answered(engine: FakeEngine, frontend: Frontend) -> None:
    frontend.send(stats=engine_pb2.StatsRequest())
    assert decode_stats(frontend.read().stats) == engine.stats()


def cut_prompt(add: engine_pb2.AddRequest) -> None:
    add.prompt_token_ids = add.prompt_token_ids[:-1]


def no_seed(add: engine_pb2.AddRequest) -> None:
    add.sampling_params.ClearField("seed")


def hot(add: engine_pb2.AddRequest) -> None:
    add.sampling_params.temperature = -1


def newer(add: engine_pb2.AddRequest) -> None:
    add.sampling_params.MergeFromString(b"\x48\x02")  # field 9, a number: 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_prompt, "prompt_token_ids has 11 bytes: must be a multiple of 4"),
        (no_seed, "seed is missing"),
        (hot, "temperature=-1.0 must be"),
        (newer, "sampling_params has fields that this server doesn't know, numbers [9]"),
    ],
)
def test_a_malformed_request_fails_alone(
    engine: FakeEngine, frontend: Frontend, damage, message: str
) -> None:
    add = make_add(1)
    damage(add)
    frontend.send(add=add)
    frontend.send(add=make_add(2))
    failed = frontend.read().failed
    assert failed.request_id == 1
    assert failed.kind == engine_pb2.RequestFailed.KIND_INVALID
    assert message in failed.message
    _, request = engine.added.get(timeout=TIMEOUT_S)
    assert request.request_id == 2


def test_a_message_of_an_unknown_kind_ends_the_stream(
    engine: FakeEngine, frontend: Frontend
) -> None:
    frontend.send()
    with pytest.raises(grpc.RpcError) as raised:
        frontend.read()
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "must be of the same version" in raised.value.details()
    engine.closed.get(timeout=TIMEOUT_S)


@pytest.mark.parametrize("end", ["cancel", "half-close", "lost"])
def test_the_connection_is_closed_however_the_stream_ends(
    engine: FakeEngine, channel: grpc.Channel, frontend: Frontend, end: str
) -> None:
    frontend.send(add=make_add(1))
    connection, _ = engine.added.get(timeout=TIMEOUT_S)
    if end == "cancel":
        frontend.call.cancel()
    elif end == "half-close":
        frontend.half_close()
        assert list(frontend.call) == []
    else:
        channel.close()
    assert engine.closed.get(timeout=TIMEOUT_S) is connection
    connection.sink([RequestOutput(1, (4,))])  # a step that was under way disturbs nobody


@pytest.mark.parametrize("token", ["wrong", TOKEN + "x"])
def test_a_stranger_is_refused(engine: FakeEngine, channel: grpc.Channel, token: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        Frontend(channel, token).read()
    assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_stop_delivers_what_is_queued_then_ends_the_streams(
    engine: FakeEngine, server: EngineServer, frontend: Frontend
) -> None:
    frontend.send(add=make_add(1))
    connection, _ = engine.added.get(timeout=TIMEOUT_S)
    connection.sink([RequestOutput(1, (4,))])
    connection.sink([RequestFailure(1, WorkerError("rank 1 is gone"))])
    stopping = threading.Thread(target=server.stop, args=(TIMEOUT_S,))
    stopping.start()
    kinds = [frontend.read().WhichOneof("message") for _ in range(2)]
    with pytest.raises(grpc.RpcError) as raised:
        frontend.read()
    stopping.join(TIMEOUT_S)
    assert not stopping.is_alive()
    assert kinds == ["outputs", "failed"]
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    assert raised.value.details() == "the engine is stopping"
    assert engine.closed.get(timeout=TIMEOUT_S) is connection


def test_two_frontends_get_their_own_tokens(engine: FakeEngine, channel: grpc.Channel) -> None:
    frontends = [Frontend(channel), Frontend(channel)]
    for frontend, token in zip(frontends, (11, 22), strict=True):
        frontend.read()
        frontend.send(add=make_add(1, [token]))
        connection, request = engine.added.get(timeout=TIMEOUT_S)
        connection.sink([RequestOutput(1, tuple(request.prompt_token_ids))])
    tokens = [engine_codec.decode_outputs(f.read().outputs)[0].token_ids for f in frontends]
    assert tokens == [(11,), (22,)]


def test_a_port_in_use_is_named(server: EngineServer) -> None:
    with pytest.raises(ConfigError, match=rf"can't listen at 127\.0\.0\.1:{server.port}"):
        EngineServer(server._servicer._engine, TOKEN, port=server.port)


def test_a_fault_while_reading_ends_the_stream_and_is_told(
    engine: FakeEngine, frontend: Frontend
) -> None:
    engine.stats = None  # a bug of ours
    frontend.send(stats=engine_pb2.StatsRequest())
    with pytest.raises(grpc.RpcError) as raised:
        frontend.read()
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
    assert raised.value.details().startswith("the engine failed: TypeError")
    engine.closed.get(timeout=TIMEOUT_S)
