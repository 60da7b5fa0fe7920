"""One of two engines is killed under requests, which complete as if nothing had happened."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import grpc
import pytest

from protos import common_pb2, inference_pb2, inference_pb2_grpc
from tests.builders import demo_model_folder

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(1000)]

TIMEOUT_S = 450
# Float32: what is computed in other batches differs in bits that choose no other token.
OPTIONS = [
    "--launcher=local",
    "--dtype=float32",
    "--kv-memory=512MiB",
    "--max-model-len=1024",
    "--threads-per-rank=1",  # both engines share this machine: more would wait for each other
]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
KINDS: list[dict[str, Any]] = [
    {},
    {"n": 2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"stop": ["the end of the", "and then he said"], "temperature": 0.7},
    {"json_schema": SCHEMA, "ignore_eos": False},
]
PROMPTS = ["Once upon a time", "The capital of France", "2, 3, 5, 7,", "def main():"]


@contextmanager
def process(*arguments: str, secret: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A command of ours, and the line in which it says where it serves."""
    keys = {"LOCKSTEP_API_KEY": secret, "LOCKSTEP_ENGINE_TOKEN": secret}
    started = subprocess.Popen(
        [sys.executable, "-m", "runtime", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | keys,
    )
    try:
        assert started.stdout is not None
        for line in started.stdout:
            if "serving" in line or line.startswith("{"):
                yield started, line
                break
        else:
            raise AssertionError(f"exit code {started.wait()}")
    finally:
        started.terminate()
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        started.stdout.close()


@contextmanager
def two_engines() -> Iterator[tuple[list["subprocess.Popen[str]"], str, str]]:
    """Their processes, the address of their frontend, and its key."""
    secret = secrets.token_hex(8)
    engine = ["serve", "--frontends=0", "--model=demo", *OPTIONS]
    with (
        process(*engine, secret=secret) as (first, first_line),
        process(*engine, secret=secret) as (second, second_line),
    ):
        addresses = ",".join(line.split()[-1] for line in (first_line, second_line))
        frontend = ["frontend", f"--engine={addresses}", "--port=0", "--http-port=0"]
        with process(*frontend, secret=secret) as (_, line):
            yield [first, second], f"127.0.0.1:{json.loads(line)['port']}", secret


def ask(
    stub: inference_pb2_grpc.InferenceStub,
    key: Sequence[tuple[str, str]],
    place: int,
    begun: Barrier,
) -> dict[int, tuple[str, list[int], int]]:
    """One request's choices, of which some tokens have come before `begun` lets it go on."""
    params = {"max_tokens": 48, "seed": place, "ignore_eos": True} | KINDS[place % len(KINDS)]
    request = inference_pb2.GenerateRequest(
        text=PROMPTS[place % len(PROMPTS)], sampling_params=common_pb2.SamplingParams(**params)
    )
    choices: dict[int, tuple[str, list[int], int]] = {}
    for count, each in enumerate(stub.Generate(request, metadata=key, timeout=TIMEOUT_S)):
        text, ids, _ = choices.get(each.index, ("", [], 0))
        choices[each.index] = (text + each.text, [*ids, *each.token_ids], each.finish_reason)
        if count == 3:
            begun.wait(TIMEOUT_S)
    return choices


def run(
    address: str, secret: str, victim: "subprocess.Popen[str] | None"
) -> list[dict[int, tuple[str, list[int], int]]]:
    key = (("authorization", f"Bearer {secret}"),)
    begun = Barrier(21)
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(20) as pool:
        stub = inference_pb2_grpc.InferenceStub(channel)
        answers = [pool.submit(ask, stub, key, place, begun) for place in range(20)]
        begun.wait(TIMEOUT_S)
        if victim is not None:
            victim.send_signal(signal.SIGKILL)
        return [each.result(TIMEOUT_S) for each in answers]


def test_requests_complete_as_undisturbed_when_an_engine_is_killed() -> None:
    demo_model_folder()
    with two_engines() as (engines, address, secret):
        undisturbed = run(address, secret, None)
        assert run(address, secret, engines[0]) == undisturbed
        assert engines[0].wait(5) == -signal.SIGKILL
    assert {len(each) for each in undisturbed} == {1, 2}
