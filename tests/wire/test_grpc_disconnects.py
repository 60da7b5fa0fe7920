"""gRPC clients that leave: the engine stops working for them at once, and nothing is kept."""

import gc
import logging
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grpc
import pytest

from protos import common_pb2, inference_pb2
from protos.auth import bearer
from runtime.engine import Engine
from runtime.engine_service import EngineServer
from runtime.frontend.choice import Choice
from runtime.frontend.engine_client import Session
from runtime.frontend.generation import Generation
from runtime.frontend.generator import TextStream
from runtime.frontend.inbox import Inbox
from runtime.frontend.observer import SeenRequest
from runtime.logs import is_wanted
from runtime.request import Request
from tests.frontend import API_KEY, TIMEOUT_S, Client, RunningFrontend
from tests.http2 import greeting, grpc_call
from tests.scheduling import OracleExecutor
from tests.served import UnhurriedOracle, make_engine, text_of, write_characters

pytestmark = pytest.mark.wire

MAX_TOKENS = 1500
PROMPT = [7] * 40
METHOD = "/lockstep.v1.Inference/"
# What there is of a request, at either end.
KEPT = frozenset({Choice, Generation, Inbox, Request, SeenRequest, Session, TextStream})
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Served(NamedTuple):
    engine: Engine
    executor: OracleExecutor
    frontend: RunningFrontend
    client: Client  # who stays


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_characters(tmp_path_factory.mktemp("model"))
    engine, executor = make_engine(
        UnhurriedOracle, path=str(folder), num_blocks=1024, prefix_cache=False
    )
    engine.start()
    server = EngineServer(engine, "engine-token")
    server.start()
    with (
        RunningFrontend(server) as frontend,
        grpc.insecure_channel(frontend.address) as channel,
    ):
        yield Served(engine, executor, frontend, Client(channel))
    server.stop(grace_s=5)
    engine.stop()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    told = filter(is_wanted, caplog.get_records("call"))
    assert [each for each in told if each.levelno >= logging.ERROR] == []


def begin(client: Client, *, n: int = 1, timeout_s: float = TIMEOUT_S) -> grpc.Call:
    """A request that would run for long."""
    return client.generate(
        token_ids=PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, n=n, timeout_s=timeout_s
    )


def read(call: grpc.Call, count: int) -> None:
    for _ in range(count):
        next(call)


def look(served: Served) -> inference_pb2.GetModelResponse:
    """A round trip; tests' timeouts bound how often."""
    return served.client.call("GetModel")


def wait_running(served: Served) -> None:
    while not served.engine.stats().num_running:
        look(served)


def wait_idle(served: Served) -> None:
    """Until nothing is left of any request, at either end."""
    engine = served.engine
    while engine.stats().num_running or engine.stats().num_waiting or engine._live:
        look(served)
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    while kept():
        look(served)


def kept() -> Counter[str]:
    """What there is of requests in this process, but for sequences of the last step."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in KEPT)


@pytest.mark.parametrize(("n", "count"), [(1, 0), (3, 1), (1, 30)])
def test_a_call_that_is_cancelled_ends_its_request(served: Served, n: int, count: int) -> None:
    before = served.engine.stats().num_output_tokens
    call = begin(served.client, n=n)
    wait_running(served)
    read(call, count)
    call.cancel()
    wait_idle(served)
    assert served.engine.stats().num_output_tokens - before < n * MAX_TOKENS


def test_a_channel_that_is_closed_ends_all_its_requests(served: Served) -> None:
    before = served.engine.stats().num_output_tokens
    with grpc.insecure_channel(served.frontend.address) as channel:
        calls = [begin(Client(channel)) for _ in range(4)]
        for call in calls:
            read(call, 2)
    wait_idle(served)
    assert served.engine.stats().num_output_tokens - before < 4 * MAX_TOKENS


def test_a_deadline_ends_its_request(served: Served) -> None:
    call = begin(served.client, timeout_s=0.2)
    with pytest.raises(grpc.RpcError) as ended:
        read(call, MAX_TOKENS)
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_idle(served)


@pytest.mark.parametrize("resets", [False, True])
def test_a_connection_that_is_cut_ends_its_request(served: Served, resets: bool) -> None:
    before = served.engine.stats().num_output_tokens
    client = connect(served)
    wait_running(served)
    cut(client, resets=resets)
    wait_idle(served)
    assert served.engine.stats().num_output_tokens - before < MAX_TOKENS


def connect(served: Served) -> socket.socket:
    """A client without gRPC's library, which has sent a request."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        sampling_params=common_pb2.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
    )
    host, port = served.frontend.address.split(":")
    client = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    call = grpc_call(f"{METHOD}Generate", API_KEY, request.SerializeToString())
    client.sendall(greeting() + call)
    return client


def cut(client: socket.socket, *, resets: bool) -> None:
    if resets:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    client.close()


def cancel_at_random(served: Served, draw: random.Random) -> None:
    call = begin(served.client, n=draw.choice([1, 1, 3]))
    read(call, draw.choice([0, 0, 1, 2, 5, 20]))
    call.cancel()


def close_at_random(served: Served, draw: random.Random) -> None:
    with grpc.insecure_channel(served.frontend.address) as channel:
        for _ in range(draw.randint(1, 3)):
            read(begin(Client(channel)), draw.choice([0, 1, 5]))


def expire_at_random(served: Served, draw: random.Random) -> None:
    with pytest.raises(grpc.RpcError):
        read(begin(served.client, timeout_s=draw.uniform(0.001, 0.2)), MAX_TOKENS)


def cut_at_random(served: Served, draw: random.Random) -> None:
    client = connect(served)
    for _ in range(draw.choice([0, 0, 1, 3])):
        client.recv(1 << 16)
    cut(client, resets=draw.random() < 0.5)


def cancel_unary_at_random(served: Served, draw: random.Random) -> None:
    """A call that answers once, which may be over before it is cancelled."""
    text = text_of([7] * draw.choice([10, 5000]))
    messages = {
        "Tokenize": inference_pb2.TokenizeRequest(text=text),
        "Detokenize": inference_pb2.DetokenizeRequest(token_ids=[7] * 1000),
        "GetStats": inference_pb2.GetStatsRequest(),
        "GetModel": inference_pb2.GetModelRequest(),
    }
    method = draw.choice(list(messages))
    with grpc.insecure_channel(served.frontend.address) as channel:
        unary = channel.unary_unary(f"{METHOD}{method}")
        call = unary.future(messages[method].SerializeToString(), metadata=bearer(API_KEY))
        if draw.random() < 0.5:
            look(served)
        call.cancel()


Leave = Callable[[Served, random.Random], None]
WAYS: tuple[Leave, ...] = (
    *(cancel_at_random, close_at_random, expire_at_random),
    *(cut_at_random, cancel_unary_at_random),
)


def leave_at_random(served: Served, draw: random.Random, count: int) -> None:
    for _ in range(count):
        draw.choice(WAYS)(served, draw)
    wait_idle(served)
    assert len(list(served.client.generate(token_ids=PROMPT, max_tokens=2, ignore_eos=True))) > 0


def test_forty_clients_leave_at_random(served: Served) -> None:
    leave_at_random(served, random.Random(5), 40)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_five_hundred_clients_leave_nothing_behind(served: Served) -> None:
    draw = random.Random(6)
    leave_at_random(served, draw, 100)
    before = num_objects(served)
    leave_at_random(served, draw, 400)
    assert num_objects(served) - before < 400  # less than one a client


def num_objects(served: Served) -> int:
    served.executor.plans.clear()  # for other tests it keeps all of them
    gc.collect()
    return len(gc.get_objects())
