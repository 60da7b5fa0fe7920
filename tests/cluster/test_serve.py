"""`lockstep serve` with several frontends: one port, deaths that are mended, draining."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import common_pb2, inference_pb2_grpc
from protos.auth import Metadata, bearer
from tests.cluster.stack import END_S, Server, collect, request, serving
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

TIMEOUT_S = 60
PROMPT = [1, 2, 3]
ENDLESS = 4000
LENGTH = common_pb2.FINISH_REASON_LENGTH
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
# A connection of its own, where gRPC would share one.
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Positions enough that no request ends before the test wants it to.
    return save_tiny_model(tmp_path_factory.mktemp("llama"), max_position_embeddings=4096)


@contextmanager
def draining(
    llama: Path, *options: str, max_tokens: int = ENDLESS
) -> Iterator[tuple[Server, list[grpc.Call]]]:
    """A server that has got SIGTERM while it answers two requests, by different connections."""
    with ExitStack() as stack:
        server = Server(f"--model={llama}", "--launcher=local", *options)
        stack.callback(server.kill)
        server.wait_until_ready()
        channels = [
            stack.enter_context(grpc.insecure_channel(server.address, OWN_CONNECTION))
            for _ in range(2)
        ]
        watches = [watch(channel) for channel in channels]
        calls = [generate(channel, server.key, max_tokens=max_tokens) for channel in channels]
        for each in calls:
            next(each)
        for each in watches:
            assert next(each).status == SERVING
        server.process.send_signal(signal.SIGTERM)
        for each in watches:
            assert next(each).status == NOT_SERVING
        for channel in channels:
            with pytest.raises(grpc.RpcError) as refusal:
                list(generate(channel, server.key, max_tokens=1))
            assert refusal.value.code() is UNAVAILABLE
        yield server, calls
        assert server.survivors() == []
        server.temporary_folder.rmdir()  # fails if the server has left a file


def watch(channel: grpc.Channel) -> Iterator[health_pb2.HealthCheckResponse]:
    return health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
    )


def generate(channel: grpc.Channel, key: Metadata, *, max_tokens: int) -> grpc.Call:
    return inference_pb2_grpc.InferenceStub(channel).Generate(
        request(PROMPT, max_tokens=max_tokens, ignore_eos=True), metadata=key, timeout=TIMEOUT_S
    )


def frontends(server: Server) -> list[psutil.Process]:
    """Those that run now."""
    server.remember_family()
    return [each for each in server.family if each.is_running() and "frontend" in each.cmdline()]


@pytest.mark.full
def test_frontends_share_a_port_and_what_they_count(llama: Path) -> None:
    with serving(f"--model={llama}", "--launcher=local", "--frontends=2") as server:
        port = int(server.address.rpartition(":")[2])
        with ExitStack() as stack:
            for _ in range(32):  # the kernel draws; not to reach one of two is a chance of 2**-31
                channel = stack.enter_context(grpc.insecure_channel(server.address, OWN_CONNECTION))
                (*_, last) = generate(channel, server.key, max_tokens=1)
                assert last.finish_reason == LENGTH
            counts = [
                sum(
                    each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED
                    for each in process.net_connections()
                )
                for process in frontends(server)
            ]
        assert len(counts) == 2
        assert min(counts) > 0
        assert sum(counts) == 32
        assert num_requests(server, "/lockstep.v1.Inference/Generate") == 32


def num_requests(server: Server, endpoint: str) -> float:
    """What a scrape says, whichever frontend it reaches."""
    scrape = urllib.request.Request(
        f"{server.http_address}/metrics", headers={"Authorization": f"Bearer {server.api_key}"}
    )
    with urllib.request.urlopen(scrape, timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("lockstep_requests_total{") and f'endpoint="{endpoint}"' in line
    )


@pytest.mark.full
def test_a_frontend_that_dies_is_started_again(llama: Path) -> None:
    with serving(f"--model={llama}", "--launcher=local") as server:
        (frontend,) = frontends(server)
        call = server.stub().Generate(
            request(PROMPT, max_tokens=ENDLESS, ignore_eos=True), metadata=server.key
        )
        next(call)
        frontend.kill()
        with pytest.raises(grpc.RpcError) as loss:
            list(call)
        assert loss.value.code() is UNAVAILABLE
        # At the same port, of which the client needs to know nothing else.
        answer = server.stub().Generate(
            request(PROMPT, max_tokens=4), metadata=server.key, wait_for_ready=True, timeout=60
        )
        assert len(collect(answer).token_ids) == 4
        (other,) = frontends(server)
        assert other.pid != frontend.pid


def test_sigterm_lets_running_requests_finish(llama: Path) -> None:
    with draining(llama, "--frontends=2", "--drain-timeout-s=100", max_tokens=100) as (
        server,
        calls,
    ):
        for call in calls:
            *_, last = call
            assert last.finish_reason == LENGTH
        assert server.process.wait(END_S) == 0


@pytest.mark.full
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(llama: Path, second: signal.Signals) -> None:
    with draining(llama) as (server, calls):
        server.process.send_signal(second)
        assert server.process.wait(END_S) == 0
        for call in calls:
            with pytest.raises(grpc.RpcError) as loss:
                list(call)
            assert loss.value.code() is UNAVAILABLE


@pytest.mark.full
def test_draining_takes_no_longer_than_it_may(llama: Path) -> None:
    with draining(llama, "--drain-timeout-s=0.5") as (server, calls):
        assert server.process.wait(END_S) == 0
        for call in calls:
            with pytest.raises(grpc.RpcError) as loss:
                list(call)
            assert loss.value.code() is UNAVAILABLE


@pytest.mark.full
def test_an_engine_drains_for_frontends_elsewhere(llama: Path) -> None:
    """Each is a command of its own, and gets a signal of its own."""
    token = "token-of-the-operator"
    environment = os.environ | {"LOCKSTEP_ENGINE_TOKEN": token, "LOCKSTEP_API_KEY": "key"}
    with ExitStack() as stack:
        server = Server(
            f"--model={llama}", "--launcher=local", "--frontends=0", LOCKSTEP_ENGINE_TOKEN=token
        )
        stack.callback(server.kill)
        server.wait_until_ready()
        command = [sys.executable, "-m", "runtime", "frontend", f"--engine={server.address}"]
        frontend = subprocess.Popen(
            [*command, "--port=0", "--http-port=0", "--resume-timeout-s=30"],
            stdout=subprocess.PIPE,
            env=environment,
        )
        stack.callback(frontend.communicate)
        stack.callback(frontend.kill)
        assert frontend.stdout is not None
        port = json.loads(frontend.stdout.readline())["port"]
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
        call = generate(channel, bearer("key"), max_tokens=500)
        next(call)
        server.process.send_signal(signal.SIGTERM)
        *_, last = call
        assert last.finish_reason == LENGTH
        assert server.process.wait(END_S) == 0
        with pytest.raises(grpc.RpcError) as refusal:
            list(generate(channel, bearer("key"), max_tokens=1))
        assert refusal.value.code() is UNAVAILABLE
        assert frontend.poll() is None  # an engine may come back
        frontend.terminate()
        assert frontend.wait(END_S) == 0
        assert server.survivors() == []
        server.temporary_folder.rmdir()
