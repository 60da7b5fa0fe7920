"""A rank dies or hangs under running requests: they pause, and get the tokens they would have."""

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx2
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime.frontend.grpc_service import SERVICE
from tests.cluster.stack import END_S, Answer, Server, collect, request
from tests.quick import quick
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

NUM_STREAMS = 4
NUM_TOKENS = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Positions enough that no request ends before the death does.
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


@pytest.fixture
def server(model: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    options = getattr(request, "param", ())
    server = Server(f"--model={model}", "--tp=2", "--launcher=local", *options)
    yield server.wait_until_ready()
    server.remember_family()
    server.kill()


def ranks(server: Server) -> list[psutil.Process]:
    server.remember_family()
    found = []
    for each in server.family:
        with contextlib.suppress(psutil.NoSuchProcess):  # of an epoch that is over
            if each.name().startswith("lockstep:rank"):
                found.append(each)
    return found


def ask(server: Server, seed: int, num_tokens: int = NUM_TOKENS) -> Iterator:
    asked = request([1, 2, seed], max_tokens=num_tokens, ignore_eos=True, seed=seed)
    return server.stub().Generate(asked, metadata=server.key)


def health(server: Server, service: str) -> int:
    with grpc.insecure_channel(server.address) as channel:
        asked = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(asked).status


def wait_ready(server: Server, status: int) -> None:
    with httpx2.Client(base_url=server.http_address) as client:
        while client.get("/ready").status_code != status:  # the test's timeout bounds them
            pass


def undisturbed(server: Server) -> list[Answer]:
    return [collect(ask(server, seed)) for seed in range(NUM_STREAMS)]


def disturbed(server: Server, number: signal.Signals) -> list[Answer]:
    """All at once; a rank gets a signal once each has begun."""
    streams = [ask(server, seed) for seed in range(NUM_STREAMS)]
    firsts = [next(stream) for stream in streams]
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        rests = [pool.submit(list, stream) for stream in streams]
        ranks(server)[-1].send_signal(number)
        wait_ready(server, 503)
        assert httpx2.get(f"{server.http_address}/health").status_code == 200
        assert health(server, "") == health_pb2.HealthCheckResponse.SERVING
        assert health(server, SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        wait_ready(server, 200)
        answers = [
            collect(iter([first, *rest.result()]))
            for first, rest in zip(firsts, rests, strict=True)
        ]
    assert health(server, SERVICE) == health_pb2.HealthCheckResponse.SERVING
    return answers


@pytest.mark.parametrize(
    "number",
    quick([signal.SIGKILL, signal.SIGSTOP], signal.SIGKILL),
    ids=["killed", "stopped"],
)
def test_requests_outlive_a_rank(server: Server, number: signal.Signals) -> None:
    expected = undisturbed(server)
    assert disturbed(server, number) == expected
    assert len(ranks(server)) == 2
    assert server.stop(signal.SIGINT) == 0
    assert server.survivors() == []


@pytest.mark.full
@pytest.mark.parametrize("server", [["--lease-s=2"]], indirect=True)
def test_a_rank_that_stops_while_idle_is_noticed(server: Server) -> None:
    ranks(server)[-1].suspend()
    wait_ready(server, 503)
    wait_ready(server, 200)
    assert len(collect(ask(server, 1)).token_ids) == NUM_TOKENS


@pytest.mark.full
@pytest.mark.parametrize("server", [["--max-restarts=0"]], indirect=True)
def test_without_restarts_a_death_is_told_and_ends_the_server(server: Server) -> None:
    streams = [ask(server, seed, 8000) for seed in range(NUM_STREAMS)]
    for stream in streams:
        next(stream)
    ranks(server)[-1].kill()
    codes = set()
    for stream in streams:
        with pytest.raises(grpc.RpcError) as loss:
            list(stream)
        codes.add(loss.value.code())
    assert codes == {grpc.StatusCode.UNAVAILABLE}
    _, errors = server.process.communicate(timeout=END_S)
    assert server.process.returncode == 1
    assert "rank" in errors.strip().splitlines()[-1]
    assert server.survivors() == []


@pytest.mark.full
def test_nothing_outlives_a_driver_that_is_killed(server: Server) -> None:
    server.process.kill()
    assert server.survivors() == []
