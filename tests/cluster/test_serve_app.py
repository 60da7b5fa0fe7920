"""Replicas on Ray Serve come, go and are killed, and no request is lost or told otherwise."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import psutil
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from protos.auth import bearer
from tests.deploy_files import DEPLOY, REPOSITORY
from tests.families import VOCABULARY
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]

KEY = "serve-app-key"
TIMEOUT_S = 120
NUM_CPUS = 8
MAX_TOKENS = 240
STREAMS = range(12)
ARGS = {
    "dtype": "float32",
    "tp": 1,
    "threads_per_rank": 1,
    "kv_memory": "64MiB",
    "max_model_len": 256,
    # Of twelve requests some wait, so that another replica is wanted.
    "max_num_seqs": 2,
    "max_replicas": 2,
    "target_queue": 1.0,
    "look_back_s": 2.0,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 3.0,
    "drain_timeout_s": 20.0,
}


def write_model(folder: Path) -> Path:
    """With a tokenizer that has a character for each token."""
    save_tiny_model(folder)
    vocab = {chr(0x4E00 + token): token for token in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=chr(0x4E00)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Replicas:
    """The application, and clients of it."""

    def __init__(self, process: "subprocess.Popen[str]", args: dict[str, Any]) -> None:
        self._process = process
        self._ports = self._ask(json.dumps({"num_cpus": NUM_CPUS, "args": args}))
        self.url = f"http://127.0.0.1:{self._ports['http']}"
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self._ports['grpc']}")
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def state(self) -> dict[str, Any]:
        return self._ask("state")

    def delete(self) -> dict[str, Any]:
        return self._ask("delete")

    def engine_processes(self) -> list[psutil.Process]:
        return [
            each
            for each in psutil.Process(self._process.pid).children(recursive=True)
            if "ServeReplica:lockstep:Engine" in " ".join(each.cmdline())
        ]

    def post(self, path: str, body: dict[str, Any], key: str = KEY) -> Any:
        return urllib.request.urlopen(
            urllib.request.Request(
                self.url + path,
                json.dumps(body).encode(),
                {"content-type": "application/json", "authorization": f"Bearer {key}"},
            ),
            timeout=TIMEOUT_S,
        )

    def get(self, path: str) -> str:
        request = urllib.request.Request(
            self.url + path, headers={"authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text

    def stream(self, number: int, begun: "SimpleQueue[int] | None" = None) -> str:
        """All that a request brings, by gRPC or by HTTP; `begun` hears of its first part."""
        parts = self._by_grpc(number) if number % 2 else self._by_http(number)
        text = next(parts)
        if begun is not None:
            begun.put(number)
        return text + "".join(parts)

    def _by_grpc(self, number: int) -> Iterator[str]:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[3, number + 4]),
            sampling_params=common_pb2.SamplingParams(
                seed=number, max_tokens=MAX_TOKENS, ignore_eos=True
            ),
        )
        for each in self.stub.Generate(request, metadata=bearer(KEY), timeout=TIMEOUT_S):
            yield each.text

    def _by_http(self, number: int) -> Iterator[str]:
        body = {
            "model": "tiny",
            "prompt": [3, number + 4],
            "seed": number,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        with self.post("/v1/completions", body) as answer:
            for line in answer:
                data = line.decode().removeprefix("data: ").strip()
                if data and data != "[DONE]":
                    yield json.loads(data)["choices"][0]["text"]

    def streams(self) -> "Streams":
        return Streams(self)


class Streams:
    """Twelve requests at once."""

    def __init__(self, replicas: Replicas) -> None:
        self._begun: SimpleQueue[int] = SimpleQueue()
        self._pool = ThreadPoolExecutor(len(STREAMS))
        self._futures = [self._pool.submit(replicas.stream, each, self._begun) for each in STREAMS]

    def wait_begun(self, count: int) -> None:
        for _ in range(count):
            self._begun.get(timeout=TIMEOUT_S)

    def results(self) -> list[str]:
        found = [each.result(TIMEOUT_S) for each in self._futures]
        self._pool.shutdown()
        return found


@contextmanager
def running(args: dict[str, Any]) -> Iterator[Replicas]:
    environment = {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(DEPLOY)]),
        "LOCKSTEP_API_KEY": KEY,
        "RAY_AUTH_TOKEN": "ab" * 16,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    }
    with subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-m", "tests.replicas"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        assert process.stdin is not None
        try:
            replicas = Replicas(process, args)
            yield replicas
            replicas.channel.close()
        finally:
            process.stdin.close()
            try:
                process.wait(TIMEOUT_S)
            finally:
                process.kill()


def check_answers(replicas: Replicas) -> None:
    """HTTP and gRPC, with a key and without."""
    assert json.loads(replicas.get("/v1/models"))["data"][0]["id"] == "tiny"
    assert "lockstep_engine_up" in replicas.get("/metrics")
    with pytest.raises(urllib.error.HTTPError) as refused:
        replicas.post("/v1/completions", {"model": "tiny", "prompt": "x"}, key="wrong")
    assert refused.value.code == 401
    refused.value.close()
    model = replicas.stub.GetModel(
        inference_pb2.GetModelRequest(), metadata=bearer(KEY), timeout=TIMEOUT_S
    )
    assert model.model == "tiny"
    with pytest.raises(grpc.RpcError) as raised:
        replicas.stub.GetModel(inference_pb2.GetModelRequest(), timeout=TIMEOUT_S)
    assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
    wrong = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[10**6]))
    with pytest.raises(grpc.RpcError) as raised:
        list(replicas.stub.Generate(wrong, metadata=bearer(KEY), timeout=TIMEOUT_S))
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "token id 1000000" in raised.value.details()


def test_replicas_come_go_and_are_killed_and_no_request_is_lost(tmp_path: Path) -> None:
    args = ARGS | {"model": str(write_model(tmp_path / "tiny")), "served_model_name": "tiny"}
    with running(args) as replicas:
        check_answers(replicas)
        with ThreadPoolExecutor(1) as one:  # alone, one after the other, on the first replica
            alone = [one.submit(replicas.stream, each).result(TIMEOUT_S) for each in STREAMS]
        assert len(set(alone)) == len(STREAMS)
        assert {len(each) for each in alone} == {MAX_TOKENS}

        keep_busy(replicas, alone)

        streams = replicas.streams()
        streams.wait_begun(3)
        replicas.engine_processes()[0].send_signal(signal.SIGKILL)
        assert streams.results() == alone
        assert num_resumed(replicas) > 0
        keep_busy(replicas, alone)

        # So little that one is enough, while the other goes.
        while replicas.state()["engines"] != {"RUNNING": 1}:
            for each in STREAMS[:4]:
                assert replicas.stream(each) == alone[each]

        left = replicas.delete()
    assert left == {"engines": {}, "free_cpus": NUM_CPUS, "groups": []}


def keep_busy(replicas: Replicas, alone: list[str]) -> None:
    """Until there are two, as so many requests wait that another is wanted."""
    while replicas.state()["engines"] != {"RUNNING": 2}:
        assert replicas.streams().results() == alone


def num_resumed(replicas: Replicas) -> float:
    (line,) = (
        each
        for each in replicas.get("/metrics").splitlines()
        if each.startswith("lockstep_resumed_requests_total")
    )
    return float(line.split()[1])
