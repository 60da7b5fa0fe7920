"""Sampling parameters at the engine's own port, which believes no frontend."""

from collections.abc import Iterator
from dataclasses import fields, replace
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from protos import engine_pb2, engine_pb2_grpc
from protos.auth import bearer
from runtime import engine_codec
from runtime.engine_service import EngineServer
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from tests.frontend import TIMEOUT_S
from tests.params import complete_params
from tests.scheduling import VOCAB_SIZE, oracle_continuation
from tests.served import make_engine

pytestmark = pytest.mark.wire

TOKEN = "engine-token"
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    engine, _ = make_engine()
    engine.start()
    server = EngineServer(engine, TOKEN)
    server.start()
    yield server.port
    server.stop(grace_s=5)
    engine.stop()


class Frontend:
    """Sends what it's told; keeps each request's answer."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outbox: SimpleQueue[engine_pb2.FrontendMessage | None] = SimpleQueue()
        self._call = engine_pb2_grpc.EngineStub(channel).Connect(
            iter(self._outbox.get, None), metadata=bearer(TOKEN), timeout=TIMEOUT_S
        )
        assert next(self._call).WhichOneof("message") == "info"
        self.tokens: dict[int, list[int]] = {}
        self.failures: dict[int, engine_pb2.RequestFailed] = {}

    def add(self, message: engine_pb2.AddRequest) -> None:
        self._outbox.put(engine_pb2.FrontendMessage(add=message))

    def wait(self, *request_ids: int) -> None:
        """Until each of them, of one choice, has ended or failed."""
        missing = {*request_ids}
        while missing:
            message = next(self._call)
            if message.WhichOneof("message") == "failed":
                self.failures[message.failed.request_id] = message.failed
                missing.remove(message.failed.request_id)
                continue
            for output in engine_codec.decode_outputs(message.outputs):
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish_reason is not None:
                    missing.remove(output.request_id)

    def close(self) -> None:
        self._outbox.put(None)
        list(self._call)


@pytest.fixture
def frontend(port: int) -> Iterator[Frontend]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        frontend = Frontend(channel)
        yield frontend
        frontend.close()


def add_message(request_id: int, **changes: Any) -> engine_pb2.AddRequest:
    """`changes` of the request, and of its parameters."""
    names = {each.name for each in fields(SamplingParams)} - {"bad_words"}
    request = Request(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        params=complete_params(
            max_tokens=30, **{name: changes.pop(name) for name in names & changes.keys()}
        ),
        seed=7,
    )
    return engine_codec.encode_request(replace(request, **changes))


IDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_token_ids": [5, -1]}, "prompt token id -1 must be in [0, 997), the vocabulary"),
    ({"prompt_token_ids": [VOCAB_SIZE, 5]}, "prompt token id 997 must be in"),
    ({"prompt_token_ids": []}, "prompt is empty: it must have at least 1 token"),
    ({"logit_bias": {-5: 1.0, 5: 1.0}}, "logit_bias token id -5 must be in"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias token id 997 must be in"),
    ({"allowed_token_ids": (-(2**31),)}, "allowed_token_ids -2147483648 must be in"),
    ({"allowed_token_ids": (5, 2**31 - 1)}, "allowed_token_ids 2147483647 must be in"),
    ({"stop_token_ids": (5, -1)}, "stop_token_ids -1 must be in"),
    ({"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids 997 must be in"),
    ({"bad_words": ((5,), (6, -1))}, "bad_words token id -1 must be in"),
    ({"bad_words": ((VOCAB_SIZE, 5),)}, "bad_words token id 997 must be in"),
    ({"regex": "a"}, "regex isn't possible: a test has no tokenizer"),
    ({"priority": 11}, "priority=11 must be in [-10, 10]"),
]
MISSING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
RAW: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n=0 must be in [1, 128]"),
    ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
    ({"max_tokens": 2**31 - 1}, "prompt of 3 tokens + max_tokens=2147483647"),
    ({"temperature": float("nan")}, "temperature=nan must be 0"),
    ({"min_p": 1.5}, "min_p=1.5 must be in [0, 1]"),
    ({"logprobs": 21}, "logprobs=21 must be in [0, 20]"),
    ({"logit_bias": {5: float("inf")}}, "logit_bias[5]=inf must be in [-100, 100]"),
    ({"allowed_token_ids": [1] * ((1 << 18) + 1)}, "allowed_token_ids has 262145 entries"),
    ({"stop": [""]}, "stop[0] is empty"),
    ({"regex": "a", "grammar": "b"}, "regex and grammar are set"),
]


def test_every_bad_request_is_refused_by_name_and_hurts_no_other(frontend: Frontend) -> None:
    frontend.add(add_message(1, ignore_eos=True))
    wanted: dict[int, str] = {}
    for request_id, (changes, message) in enumerate(IDS, start=2):
        frontend.add(add_message(request_id, **changes))
        wanted[request_id] = message
    for request_id, (values, message) in enumerate(RAW, start=100):
        add = add_message(request_id)
        for name in values:
            add.sampling_params.ClearField(name)
        add.sampling_params.MergeFrom(type(add.sampling_params)(**values))
        frontend.add(add)
        wanted[request_id] = message
    for request_id, name in enumerate(MISSING, start=200):
        add = add_message(request_id)
        add.sampling_params.ClearField(name)
        frontend.add(add)
        wanted[request_id] = f"{name} is missing: the frontend must set it"
    frontend.wait(1, *wanted)
    for request_id, message in wanted.items():
        failed = frontend.failures[request_id]
        assert failed.kind == engine_pb2.RequestFailed.KIND_INVALID
        assert failed.message.startswith(message)
    assert frontend.tokens == {
        1: oracle_continuation(PROMPT, max_tokens=30, seed=7, ignore_eos=True)
    }


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("prompt", "prompt_token_ids has 5 bytes: must be a multiple of 4"),
        ("bad_words", "bad_words has 5 bytes: must be a multiple of 4"),
        ("seed", "seed is missing: the frontend must set it"),
        ("newer", "sampling_params has fields that this server doesn't know, numbers [26]"),
    ],
)
def test_a_message_that_can_not_be_read_is_refused(
    frontend: Frontend, field: str, message: str
) -> None:
    add = add_message(1)
    match field:
        case "prompt":
            add.prompt_token_ids = b"12345"
        case "bad_words":
            add.bad_words.add(ids=b"1234")
            add.bad_words.add(ids=b"12345")
        case "seed":
            add.sampling_params.ClearField("seed")
        case _:
            add.sampling_params.MergeFromString(b"\xd0\x01\x05")
    frontend.add(add)
    frontend.add(add_message(2))
    frontend.wait(1, 2)
    assert frontend.failures[1].message.startswith(message)
    assert frontend.tokens == {2: oracle_continuation(PROMPT, max_tokens=30, seed=7)}


def test_an_id_is_free_once_its_request_was_refused(frontend: Frontend) -> None:
    """And bad words of no tokens forbid nothing."""
    frontend.add(add_message(1, bad_words=((5, -1),)))
    frontend.add(add_message(1, bad_words=((), (), ())))
    frontend.wait(1)
    frontend.wait(1)
    assert frontend.failures[1].message.startswith("bad_words token id -1")
    assert frontend.tokens == {1: oracle_continuation(PROMPT, max_tokens=30, seed=7)}
