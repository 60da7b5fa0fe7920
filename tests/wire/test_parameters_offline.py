"""Sampling parameters offline, and texts among them that the model has no tokens for."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest

from runtime import llm as llm_module
from runtime.errors import InvalidRequestError, ModelOutputError
from runtime.llm import LLM
from runtime.request import FinishReason
from runtime.sampling_params import SamplingParams
from runtime.scheduling.step_plan import Fault
from tests.frontend import FakeEngine, make_model, status_of
from tests.served import make_engine, serving, write_characters

pytestmark = pytest.mark.wire


@contextmanager
def offline(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(llm_module, "running_engine", lambda *_, **__: nullcontext(engine))
    with LLM(progress=False) as llm:
        yield llm


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {600: 1.0}}, "logit_bias token id 600 must be in [0, 600)"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids -1 must be in [0, 600)"),
        ({"stop_token_ids": [600]}, "stop_token_ids 600 must be in [0, 600)"),
        ({"bad_words": ["x" * 65]}, "bad_words[0] has 65 tokens: must be at most 64"),
        ({"max_tokens": 4096}, "prompt of 1 tokens + max_tokens=4096 is 4097 tokens"),
    ],
)
def test_what_the_model_can_not_serve_names_its_prompt_and_runs_none(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], message: str
) -> None:
    with offline(engine, monkeypatch) as llm:
        each = [SamplingParams(), SamplingParams(**params)]
        with pytest.raises(InvalidRequestError) as raised:
            llm.generate([[5], [6]], each, progress=False)
        assert str(raised.value).startswith(f"prompts[1]: {message}")
        with pytest.raises(InvalidRequestError) as raised:
            next(llm.stream([6], SamplingParams(**params)))
        assert str(raised.value).startswith(f"prompts[0]: {message}")
    assert engine.added.empty()


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_need_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    engine = FakeEngine(make_model(str(tmp_path)))
    message = f"{name} is set, and the model has no tokenizer.json: leave it unset"
    with serving(engine) as client:
        status = status_of(client.generate(token_ids=[5], **{name: ["x"]}))
        assert status == (grpc.StatusCode.INVALID_ARGUMENT, message)
    with offline(engine, monkeypatch) as llm, pytest.raises(InvalidRequestError, match=message):
        llm.generate([[5]], SamplingParams(**{name: ("x",)}), progress=False)
    assert engine.added.empty()


def test_words_whose_tokens_the_model_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer has 997."""
    engine = FakeEngine(make_model(str(write_characters(tmp_path)), vocab_size=100))
    message = "bad_words token id 200 must be in [0, 100), the vocabulary"
    word = chr(0x4E00 + 200)
    with serving(engine) as client:
        status = status_of(client.generate(token_ids=[5], bad_words=[word]))
        assert status == (grpc.StatusCode.INVALID_ARGUMENT, message)
    with offline(engine, monkeypatch) as llm, pytest.raises(InvalidRequestError) as raised:
        llm.generate([[5]], SamplingParams(bad_words=(word,)), progress=False)
    assert str(raised.value) == f"prompts[0]: {message}"
    assert engine.added.empty()


@pytest.mark.parametrize("fault", Fault)
def test_a_fault_is_its_prompts_alone_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    engine, executor = make_engine()
    execute = executor.execute
    spoilt_ids = {1, 5}  # the first request's first choice, and the third request

    def faulty(plan: Any, masks: Any = None) -> Any:
        result = execute(plan, masks)
        for sequence_id in spoilt_ids.intersection(result.sequence_ids):
            result.faults[result.sequence_ids.index(sequence_id)] = fault
        return result

    executor.execute = faulty
    engine.start()
    kind = ModelOutputError if fault is Fault.INVALID_LOGITS else InvalidRequestError
    with offline(engine, monkeypatch) as llm:
        params = SamplingParams(max_tokens=5, n=2, ignore_eos=True)
        *spoilt, first, second = llm.generate([[5], [6]], params, progress=False)
        assert [type(each.error) for each in spoilt] == [kind, kind]
        assert [each.finish_reason for each in spoilt] == [FinishReason.ABORT] * 2
        assert first.error is second.error is None
        assert len(first.token_ids) == len(second.token_ids) == 5
        with pytest.raises(kind):
            list(llm.stream([5], params=SamplingParams(max_tokens=5)))
        (completion,) = llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(completion.token_ids) == 3
    engine.stop()
