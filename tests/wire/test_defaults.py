"""What a request leaves unset takes the model's default, whichever way it enters."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from protos import common_pb2
from runtime import llm as llm_module
from runtime.cli import cli
from runtime.config import EngineConfig
from runtime.driver import running_engine
from runtime.engine import Sink
from runtime.engine_service import EngineServer
from runtime.errors import ConfigError, InvalidRequestError, UnavailableError
from runtime.llm import LLM
from runtime.request import FinishReason, Request, RequestOutput
from runtime.sampling_params import LOCKSTEP_DEFAULTS, SamplingDefaults, SamplingParams
from tests.frontend import (
    MAX_MODEL_LEN,
    FakeConnection,
    FakeEngine,
    RunningFrontend,
    make_model,
    status_of,
)
from tests.served import serving

pytestmark = pytest.mark.wire

DEFAULTS = SamplingDefaults(
    max_tokens=3000, temperature=0.6, top_k=50, top_p=0.9, min_p=0.05, repetition_penalty=1.1
)
PROMPT = [5, 6, 7]
# Not the model's defaults, though some are Lockstep's own and some are zeros.
EXPLICIT = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"top_k": 0},
    {"top_p": 1.0},
    {"min_p": 0.0},
    {"repetition_penalty": 1.0},
    {"max_tokens": 16},
    asdict(LOCKSTEP_DEFAULTS),
]


class AnsweringConnection(FakeConnection):
    def add(self, request: Request) -> None:
        super().add(request)
        self.sink([RequestOutput(request.request_id, (7,), FinishReason.LENGTH)])


class AnsweringEngine(FakeEngine):
    """Answers each request with a token, at once."""

    def connect(self, sink: Sink) -> FakeConnection:
        return AnsweringConnection(self, sink)

    def asked(self) -> dict[str, Any]:
        """What it got of the fields that have defaults."""
        _, request = self.added.get_nowait()
        return {name: getattr(request.params, name) for name in asdict(DEFAULTS)}


@pytest.fixture
def engine(folder: Any) -> AnsweringEngine:
    return AnsweringEngine(make_model(str(folder), defaults=DEFAULTS))


@contextmanager
def by_grpc(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    with serving(engine) as client:
        yield lambda prompt, **params: list(client.generate(token_ids=prompt, **params))


@contextmanager
def by_llm(engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(llm_module, "running_engine", lambda *_, **__: nullcontext(engine))
    with LLM(progress=False) as llm:
        yield lambda prompt, **params: list(llm.stream(prompt, SamplingParams(**params)))


Entry = Callable[[AnsweringEngine, pytest.MonkeyPatch], Any]
entries = pytest.mark.parametrize("entry", [by_grpc, by_llm])


@entries
def test_unset_fields_take_the_models_defaults(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch, entry: Entry
) -> None:
    with entry(engine, monkeypatch) as generate:
        generate(PROMPT)
        assert engine.asked() == asdict(DEFAULTS)
        generate(PROMPT, seed=7, n=1, stop=["."])
        assert engine.asked() == asdict(DEFAULTS)


@entries
def test_set_fields_stay_and_the_others_take_the_defaults(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch, entry: Entry
) -> None:
    with entry(engine, monkeypatch) as generate:
        for values in EXPLICIT:
            generate(PROMPT, **values)
            assert engine.asked() == asdict(DEFAULTS) | values


@entries
def test_the_default_of_max_tokens_is_cut_to_what_the_prompt_leaves(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch, entry: Entry
) -> None:
    with entry(engine, monkeypatch) as generate:
        for num_prompt, max_tokens in [(1096, 3000), (1097, 2999), (MAX_MODEL_LEN - 1, 1)]:
            generate([5] * num_prompt)
            assert engine.asked()["max_tokens"] == max_tokens
        generate([5] * (MAX_MODEL_LEN - 9), min_tokens=9)
        assert engine.asked()["max_tokens"] == 9


REFUSED: list[tuple[int, dict[str, int], str]] = [
    # What is set isn't cut.
    (1097, {"max_tokens": 3000}, "prompt of 1097 tokens + max_tokens=3000 is 4097 tokens: more "),
    (MAX_MODEL_LEN, {}, "prompt of 4096 tokens + at least 1 new is 4097 tokens: more than"),
    (MAX_MODEL_LEN - 8, {"min_tokens": 9}, "prompt of 4088 tokens + at least 9 new is 4097 tokens"),
    (
        3,
        {"min_tokens": 3001},
        "min_tokens=3001 must be at least 0 and at most max_tokens=3000, the default",
    ),
]


def test_what_does_not_fit_is_refused(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(engine) as client:
        for num_prompt, params, message in REFUSED:
            call = client.generate(token_ids=[5] * num_prompt, **params)
            code, details = status_of(call)
            assert code == grpc.StatusCode.INVALID_ARGUMENT
            assert details.startswith(message)
    with by_llm(engine, monkeypatch) as generate:
        for num_prompt, params, message in REFUSED:
            with pytest.raises(InvalidRequestError) as raised:
                generate([5] * num_prompt, **params)
            assert str(raised.value).startswith(f"prompts[0]: {message}")
    assert engine.added.empty()


def test_the_terminal_and_a_caller_without_parameters_get_them_too(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_module, "running_engine", lambda *_, **__: nullcontext(engine))
    result = CliRunner().invoke(cli, ["generate", "two words"])
    assert result.exit_code == 0, result.output
    assert engine.asked() == asdict(DEFAULTS)
    result = CliRunner().invoke(cli, ["generate", "two words", "--temperature=1", "--top-k=0"])
    assert result.exit_code == 0, result.output
    assert engine.asked() == asdict(DEFAULTS) | {"temperature": 1.0, "top_k": 0}
    with LLM(progress=False) as llm:
        llm.generate([PROMPT, PROMPT], progress=False)
        llm.generate([PROMPT], [SamplingParams(top_p=1.0)], progress=False)
    asked = [engine.asked() for _ in range(3)]
    assert asked == [asdict(DEFAULTS)] * 2 + [asdict(DEFAULTS) | {"top_p": 1.0}]


def test_the_public_api_tells_them(engine: AnsweringEngine) -> None:
    with serving(engine) as client:
        told = client.call("GetModel").default_sampling_params
    assert told == common_pb2.SamplingParams(**asdict(DEFAULTS))


def test_a_frontend_does_not_serve_for_an_engine_that_tells_none(
    engine: AnsweringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.engine_codec.encode_defaults", lambda _: None)
    server = EngineServer(engine, "engine-token")
    server.start()
    try:
        message = "EngineInfo can't be used: default_sampling_params has no max_tokens"
        with pytest.raises(UnavailableError, match=message), RunningFrontend(server):
            pass
    finally:
        server.stop(grace_s=5)


def test_a_broken_file_is_found_before_any_worker_starts(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"top_p": 2}')
    started: list[object] = []
    monkeypatch.setattr("runtime.driver.Epochs.start", lambda *_, **__: started.append(1))
    config = EngineConfig(model=str(tmp_path))
    with (
        pytest.raises(ConfigError, match=r"generation_config.json: top_p: top_p=2 must be in"),
        running_engine(config, quiet=True),
    ):
        pass
    assert started == []
