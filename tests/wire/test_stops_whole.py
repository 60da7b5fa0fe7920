"""Stop strings and stop tokens of requests that an engine runs, over gRPC and offline."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime import llm as llm_module
from runtime.engine import Engine
from runtime.llm import LLM, Chunk
from runtime.request import FinishReason
from runtime.sampling_params import SamplingParams, fork_seed
from tests.frontend import Client
from tests.scheduling import oracle_continuation
from tests.served import (
    UnhurriedOracle,
    logprobs_of,
    make_engine,
    serving,
    text_of,
    write_characters,
)

pytestmark = pytest.mark.wire

STOP = FinishReason.STOP
LENGTH = FinishReason.LENGTH
PROMPT = [3, 1, 4, 1, 5]
SEED = 11
LONG = 1900  # tokens that no request here may come to have


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_characters(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    engine, _ = make_engine(UnhurriedOracle, path=str(folder), num_blocks=1024)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def client(engine: Engine) -> Iterator[Client]:
    with serving(engine) as client:
        yield client


@pytest.fixture
def llm(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    @contextmanager
    def running_engine(*_: object, **__: object) -> Iterator[Engine]:
        yield engine

    monkeypatch.setattr(llm_module, "running_engine", running_engine)
    with LLM(progress=False) as llm:
        yield llm


def continuation(choice: int = 0, *, max_tokens: int = 40) -> list[int]:
    seed = fork_seed(SEED, choice)
    return oracle_continuation(PROMPT, max_tokens=max_tokens, seed=seed, ignore_eos=True)


def test_choices_stop_where_their_own_text_does(engine: Engine, client: Client) -> None:
    tokens = [continuation(choice) for choice in range(3)]
    stops = [text_of(tokens[1][5:8]), text_of(tokens[2][20:21])]
    call = client.generate(
        token_ids=PROMPT, n=3, seed=SEED, max_tokens=40, ignore_eos=True, stop=stops, logprobs=0
    )
    texts, got = ["", "", ""], [[], [], []]
    lasts = {}
    for response in call:
        assert response.index not in lasts
        texts[response.index] += response.text
        got[response.index].extend(response.token_ids)
        assert len(response.logprobs) == len(response.token_ids)
        if response.finish_reason:
            lasts[response.index] = response
    assert got == [tokens[0], tokens[1][:8], tokens[2][:21]]
    assert texts == [text_of(tokens[0]), text_of(tokens[1][:5]), text_of(tokens[2][:20])]
    assert [lasts[index].finish_reason for index in range(3)] == [LENGTH, STOP, STOP]
    assert [lasts[index].stop_string for index in range(3)] == ["", *stops]
    assert response.usage.num_output_tokens == 40 + 8 + 21


def test_the_engine_ends_what_has_stopped(engine: Engine, client: Client) -> None:
    stop = text_of(continuation()[5:7])
    for include in (False, True):
        responses = list(
            client.generate(
                token_ids=PROMPT,
                seed=SEED,
                max_tokens=LONG,
                ignore_eos=True,
                stop=[stop],
                include_stop_str_in_output=include,
            )
        )
        wanted = text_of(continuation()[: 7 if include else 5])
        assert "".join(each.text for each in responses) == wanted
    while stats(client).num_running:  # each call is a round trip, and bounded by the test's timeout
        assert engine.stats().num_output_tokens < 2 * LONG, "it ran to its end"
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.stats().num_output_tokens < 2 * LONG


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens_end_a_choice(client: Client, include: bool, ignore_eos: bool) -> None:
    tokens = continuation()
    responses = list(
        client.generate(
            token_ids=PROMPT,
            seed=SEED,
            max_tokens=40,
            ignore_eos=ignore_eos,
            stop_token_ids=[996, tokens[6]],
            include_stop_str_in_output=include,
        )
    )
    assert [token for each in responses for token in each.token_ids] == tokens[:7]
    text = text_of(tokens[: 7 if include else 6])
    assert "".join(each.text for each in responses) == text
    assert (responses[-1].finish_reason, responses[-1].stop_token_id) == (STOP, tokens[6])
    assert responses[-1].usage.num_output_tokens == 7


def test_no_stop_before_min_tokens(client: Client) -> None:
    tokens = continuation()
    options = {
        "token_ids": PROMPT,
        "seed": SEED,
        "max_tokens": 40,
        "min_tokens": 7,
        "ignore_eos": True,
    }
    for stop in ({"stop_token_ids": [tokens[6]]}, {"stop": [text_of(tokens[6:7])]}):
        last = list(client.generate(**options, **stop))[-1]
        assert (last.finish_reason, last.usage.num_output_tokens) == (LENGTH, 40)
    for stop in ({"stop_token_ids": [tokens[7]]}, {"stop": [text_of(tokens[6:8])]}):
        last = list(client.generate(**options, **stop))[-1]
        assert (last.finish_reason, last.usage.num_output_tokens) == (STOP, 8)


def test_a_stop_string_in_the_last_token(client: Client) -> None:
    tokens = continuation()
    (*_, last) = client.generate(
        token_ids=PROMPT, seed=SEED, max_tokens=8, ignore_eos=True, stop=[text_of(tokens[6:8])]
    )
    assert (last.finish_reason, last.stop_string) == (STOP, text_of(tokens[6:8]))
    assert last.usage.num_output_tokens == 8


def test_offline_choices_stop_alike(engine: Engine, llm: LLM) -> None:
    tokens = [continuation(choice) for choice in range(2)]
    stop = text_of(tokens[1][5:8])
    params = SamplingParams(
        max_tokens=40, n=2, seed=SEED, ignore_eos=True, stop=(stop,), logprobs=0
    )
    kept, cut = llm.generate([PROMPT], params, progress=False)
    assert (kept.text, kept.finish_reason, kept.stop) == (text_of(tokens[0]), LENGTH, None)
    assert (cut.text, cut.finish_reason, cut.stop) == (text_of(tokens[1][:5]), STOP, stop)
    assert cut.token_ids == tuple(tokens[1][:8])
    assert cut.logprobs == tuple(logprobs_of(token, 0) for token in tokens[1][:8])
    assert len(kept.logprobs) == 40


def test_offline_the_engine_ends_what_has_stopped(engine: Engine, llm: LLM) -> None:
    stop = text_of(continuation()[5:7])
    params = SamplingParams(max_tokens=LONG, seed=SEED, ignore_eos=True, stop=(stop,))
    other = SamplingParams(max_tokens=300, seed=SEED, ignore_eos=True)
    cut, whole = llm.generate([PROMPT, PROMPT], [params, other], progress=False)
    assert cut.text == text_of(continuation()[:5])
    assert whole.token_ids == tuple(continuation(max_tokens=300))
    assert engine.stats().num_output_tokens < LONG


@pytest.mark.parametrize("include", [False, True])
def test_a_stream_ends_at_its_stop_string(llm: LLM, include: bool) -> None:
    tokens = continuation()
    stop = text_of(tokens[5:7])
    params = SamplingParams(
        max_tokens=LONG,
        seed=SEED,
        ignore_eos=True,
        stop=(stop,),
        include_stop_str_in_output=include,
        logprobs=0,
    )
    chunks: list[Chunk] = list(llm.stream(PROMPT, params))
    assert "".join(chunk.text for chunk in chunks) == text_of(tokens[: 7 if include else 5])
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens[:7]
    assert [entry for chunk in chunks for entry in chunk.logprobs] == [
        logprobs_of(token, 0) for token in tokens[:7]
    ]
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [STOP]
    assert [chunk.stop for chunk in chunks] == [None] * (len(chunks) - 1) + [stop]


def test_a_stream_ends_at_its_stop_token(llm: LLM) -> None:
    tokens = continuation()
    params = SamplingParams(max_tokens=40, seed=SEED, ignore_eos=True, stop_token_ids=(tokens[6],))
    chunks = list(llm.stream(PROMPT, params))
    assert "".join(chunk.text for chunk in chunks) == text_of(tokens[:6])
    assert (chunks[-1].finish_reason, chunks[-1].stop) == (STOP, tokens[6])


def stats(client: Client) -> object:
    return client.call("GetStats").engines[0].stats
