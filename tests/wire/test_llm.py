"""Offline generation of several choices, over an engine whose steps the test writes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime import llm as llm_module
from runtime.errors import CapacityError, InvalidRequestError, UnavailableError
from runtime.llm import LLM
from runtime.request import FinishReason, RequestFailure, RequestOutput
from runtime.sampling_params import SamplingParams, fork_seed
from tests.frontend import TIMEOUT_S, FakeEngine

pytestmark = pytest.mark.wire

STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH


@pytest.fixture
def llm(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    @contextmanager
    def running_engine(*_: object, **__: object) -> Iterator[FakeEngine]:
        yield engine

    monkeypatch.setattr(llm_module, "running_engine", running_engine)
    with LLM(progress=False) as llm:
        yield llm


def answering(engine: FakeEngine, num_requests: int, *steps: list[RequestOutput]) -> None:
    """Waits for so many requests on a thread, then gives the steps."""

    def run() -> None:
        connections = [engine.added.get(timeout=TIMEOUT_S)[0] for _ in range(num_requests)]
        for step in steps:
            connections[0].sink(step)

    threading.Thread(target=run, daemon=True).start()


def test_completions_come_prompt_by_prompt_and_choice_by_choice(
    engine: FakeEngine, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(
        engine,
        2,
        [RequestOutput(1, (20,), None, 0, 3), RequestOutput(0, (11,), STOP, 1, 16)],
        [RequestOutput(0, (10,), None, 0, 16), RequestOutput(0, (12, 13), LENGTH, 2, 16)],
        [RequestOutput(0, (14,), LENGTH, 0, 16), RequestOutput(1, (21,), STOP, 0, 3)],
    )
    params = [SamplingParams(max_tokens=2, n=3, seed=77), SamplingParams(max_tokens=9)]
    completions = llm.generate([[5, 6], [7]], params)
    assert [(each.prompt_token_ids, each.index, each.token_ids) for each in completions] == [
        ((5, 6), 0, (10, 14)),
        ((5, 6), 1, (11,)),
        ((5, 6), 2, (12, 13)),
        ((7,), 0, (20, 21)),
    ]
    assert [each.seed for each in completions[:3]] == [fork_seed(77, index) for index in range(3)]
    assert [each.finish_reason for each in completions] == [LENGTH, STOP, LENGTH, STOP]
    assert [each.num_cached_tokens for each in completions] == [16, 16, 16, 3]
    # The bar ends full, with the tokens of all choices.
    assert "7/7" in capsys.readouterr().err


def test_each_choice_has_its_own_text(engine: FakeEngine, llm: LLM) -> None:
    tokens = [llm._tokenizer.encode(text) for text in ("fox", "dog")]
    answering(
        engine,
        1,
        [RequestOutput(0, tuple(tokens[index]), LENGTH, index) for index in (1, 0)],
    )
    completions = llm.generate("two", SamplingParams(n=2), progress=False)
    assert [each.text for each in completions] == ["fox", "dog"]


def test_a_stream_of_two_choices_is_refused(engine: FakeEngine, llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="n=2 must be 1: a stream has one choice"):
        next(llm.stream([5], SamplingParams(n=2)))
    assert engine.added.empty()


def test_a_full_queue_ends_all(engine: FakeEngine, llm: LLM) -> None:
    full = CapacityError("max_queued_requests=1", retry_after_s=1)
    answering(engine, 2, [RequestOutput(0, (9,), None, 1)], [RequestFailure(1, full)])
    with pytest.raises(CapacityError, match="max_queued_requests=1"):
        llm.generate([[5], [6]], SamplingParams(n=2), progress=False)
    engine.closed.get(timeout=TIMEOUT_S)


def test_a_closed_one_says_so(engine: FakeEngine, llm: LLM) -> None:
    llm.close()
    llm.close()
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate([[1]], SamplingParams(max_tokens=1), progress=False)
    assert engine.added.empty()
