"""Several engines behind one frontend: lost ones are gone on from, exactly, by gRPC."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from protos import inference_pb2
from runtime.engine_service import EngineServer
from runtime.errors import UnavailableError
from tests.frontend import TIMEOUT_S, Client, RunningFrontend, status_of
from tests.quick import quick
from tests.served import make_engine, write_characters

if TYPE_CHECKING:
    from runtime.engine import Engine

pytestmark = pytest.mark.wire

TOKEN = "engine-token"
LONG = 400
NUM_FREE_STEPS = 20
ASKS: list[dict[str, Any]] = [
    {"n": 1},
    {"n": 3, "seed": 7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"min_tokens": 390, "logprobs": 2},
    {"temperature": 0.0, "stop_token_ids": [5]},
]


class Engines:
    """Two engines of the same model, and a client of their frontend."""

    def __init__(self, folder: Path) -> None:
        self.released = Event()  # until then an engine makes no more than a few steps
        self.engines: list[Engine] = []
        self.servers: list[EngineServer] = []
        for _ in range(2):
            engine, executor = make_engine(
                path=str(folder), num_blocks=4000, model={"fingerprint": "same"}
            )
            hold(executor, self.released)
            engine.start()
            server = EngineServer(engine, TOKEN)
            server.start()
            self.engines.append(engine)
            self.servers.append(server)

    def stop(self) -> None:
        self.released.set()
        for engine, server in zip(self.engines, self.servers, strict=True):
            server.stop(grace_s=5)
            engine.stop()

    def busy(self) -> int:
        """Which engine has the only request."""
        (found,) = [
            place
            for place, engine in enumerate(self.engines)
            if engine.stats().num_running + engine.stats().num_waiting
        ]
        return found


def hold(executor: Any, released: Event) -> None:
    execute, steps = executor.execute, count(1)

    def execute_when_released(*arguments: Any) -> Any:
        if next(steps) > NUM_FREE_STEPS:
            assert released.wait(TIMEOUT_S)
        return execute(*arguments)

    executor.execute = execute_when_released


@contextmanager
def two_engines(folder: Path, **options: Any) -> Iterator[tuple[Engines, Client]]:
    engines = Engines(folder)
    with ExitStack() as stack:
        stack.callback(engines.stop)
        options = {"resume_timeout_s": TIMEOUT_S} | options
        frontend = stack.enter_context(RunningFrontend(*engines.servers, **options))
        channel = stack.enter_context(grpc.insecure_channel(frontend.address))
        yield engines, Client(channel)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_characters(tmp_path / "model")


def gather(responses: list[inference_pb2.GenerateResponse]) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    for each in responses:
        choice = choices.setdefault(each.index, {"text": "", "ids": [], "logprobs": [], "end": 0})
        choice["text"] += each.text
        choice["ids"] += each.token_ids
        choice["logprobs"] += [
            (entry.token_id, entry.logprob, [(t.token_id, t.logprob) for t in entry.top])
            for entry in each.logprobs
        ]
        choice["end"] = each.finish_reason or choice["end"]
    usage = responses[-1].usage
    return choices | {"usage": (usage.num_prompt_tokens, usage.num_output_tokens)}


@pytest.mark.parametrize("ask", quick(ASKS, ASKS[1]), ids=lambda ask: ",".join(ask))
def test_a_request_goes_on_when_its_engine_is_lost(folder: Path, ask: dict[str, Any]) -> None:
    options = {"token_ids": [3, 4, 5], "max_tokens": LONG, "ignore_eos": True, "seed": 1} | ask
    with two_engines(folder) as (engines, client):
        engines.released.set()
        undisturbed = gather(list(client.generate(**options)))
    with two_engines(folder) as (engines, client):
        call = client.generate(**options)
        responses = [next(call)]
        engines.servers[engines.busy()].stop(grace_s=0)
        engines.released.set()
        responses += call
    assert gather(responses) == undisturbed
    assert sum(bool(each.prompt_token_ids) for each in responses) == 1


def test_a_client_resumes_a_stream_elsewhere(folder: Path) -> None:
    options = {"max_tokens": 40, "ignore_eos": True, "n": 2, "logprobs": 1, "seed": 9}
    with two_engines(folder) as (engines, client):
        engines.released.set()
        responses = list(client.generate(token_ids=[3, 4, 5], **options))
    undisturbed = gather(responses)
    for num_received in (1, 7, len(responses) // 2, len(responses) - 1):
        received = responses[:num_received]
        with two_engines(folder) as (engines, client):
            engines.released.set()
            rest = list(resumed(client, received, **options))
        assert gather(received + rest) == undisturbed, num_received


def resumed(
    client: Client, received: list[inference_pb2.GenerateResponse], **params: Any
) -> grpc.Call:
    resume = inference_pb2.Resume(
        seed=received[0].seed, model_fingerprint=received[0].model_fingerprint
    )
    resume.prompt_token_ids.ids.extend(received[0].prompt_token_ids)
    for index in range(params["n"]):
        ids = [token for each in received if each.index == index for token in each.token_ids]
        resume.outputs.add(ids=ids)
    return client.generate(resume=resume, **params)


def test_what_was_complete_brings_usage_alone(folder: Path) -> None:
    with two_engines(folder) as (_, client):
        responses = list(client.generate(token_ids=[3], max_tokens=6, ignore_eos=True, n=1))
        (last,) = resumed(client, responses, max_tokens=6, ignore_eos=True, n=1)
    assert not last.token_ids
    assert last.usage.num_output_tokens == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_fingerprint": "another"}, "resume.model_fingerprint='another' isn't that"),
        ({"outputs": [[1, 2, 3]]}, "resume.outputs[0] has 3 tokens: more than max_tokens=2"),
        ({"outputs": [[1], [1]]}, "resume.outputs has 2 entries: must be at most n=1"),
        ({"outputs": [[70000]]}, "resume.outputs[0] has token id 70000: must be in [0,"),
        ({"num_prompt_logprobs": 2}, "resume.num_prompt_logprobs=2 must be at most the 1 tokens"),
    ],
)
def test_what_cannot_have_been_received_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {"model_fingerprint": "same", "outputs": []} | changes
    outputs = [inference_pb2.TokenIds(ids=ids) for ids in fields.pop("outputs")]
    prompt = inference_pb2.TokenIds(ids=[3])
    resume = inference_pb2.Resume(seed=1, prompt_token_ids=prompt, outputs=outputs, **fields)
    with two_engines(folder) as (_, client):
        code, details = status_of(client.generate(resume=resume, max_tokens=2))
    assert message in details
    wanted = "FAILED_PRECONDITION" if "fingerprint" in message else "INVALID_ARGUMENT"
    assert code.name == wanted


def test_without_an_engine_requests_are_refused_and_run_out(folder: Path) -> None:
    with two_engines(folder, resume_timeout_s=0.3) as (engines, client):
        call = client.generate(token_ids=[3], max_tokens=3900, ignore_eos=True)
        next(call)
        for server in engines.servers:
            server.stop(grace_s=0)
        code, details = status_of(call)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "for resume_timeout_s=0.3" in details
        assert status_of(client.generate(token_ids=[3]))[0] is grpc.StatusCode.UNAVAILABLE


def test_an_engine_with_another_model_gets_nothing(folder: Path) -> None:
    engines = Engines(folder)
    other, _ = make_engine(path=str(folder), model={"fingerprint": "other"})
    other.start()
    server = EngineServer(other, TOKEN)
    server.start()
    try:
        with (
            RunningFrontend(engines.servers[0], server, resume_timeout_s=5.0) as frontend,
            grpc.insecure_channel(frontend.address) as channel,
        ):
            client = Client(channel)
            fingerprint = client.call("GetModel").model_fingerprint
            for _ in range(4):
                list(client.generate(token_ids=[3], max_tokens=2))
            (status,) = client.call("GetStats").engines
            assert fingerprint in ("same", "other")
            assert status.stats.num_finished_length + status.stats.num_finished_stop == 4
    finally:
        server.stop(grace_s=5)
        other.stop()
        engines.stop()


def test_nobody_at_any_address_is_an_error() -> None:
    class Nowhere:
        port = 1
        token = TOKEN

    with pytest.raises(UnavailableError, match="can't be used"), RunningFrontend(Nowhere()):
        pass
