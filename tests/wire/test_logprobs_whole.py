"""Log probabilities of requests that an engine runs: cold, warm, chunked, preempted."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime import llm as llm_module
from runtime.engine import Engine
from runtime.llm import LLM
from runtime.request import TokenLogprobs
from runtime.sampling_params import SamplingParams, fork_seed
from runtime.scheduling.policy import PriorityPolicy
from tests.frontend import Client
from tests.scheduling import oracle_continuation, oracle_scores
from tests.served import Served, logprobs_of, make_engine, serving

pytestmark = pytest.mark.wire

PROMPT = [1 + place % 7 for place in range(45)]


def wanted_logprobs(tokens: list[int], count: int) -> list[TokenLogprobs]:
    return [logprobs_of(token, count) for token in tokens]


@pytest.mark.parametrize("budget", [8, 32, 64])  # many chunks, two, one
def test_scores_are_the_oracles_on_a_cold_and_a_warm_cache(budget: int) -> None:
    served = Served(max_num_batched_tokens=budget)
    for request_id in (1, 2, 3):
        served.add(request_id, PROMPT, params={"prompt_logprobs": 0})
        served.drain()
        assert served.scores[request_id, 0] == oracle_scores(PROMPT)
        wanted = oracle_continuation(PROMPT, max_tokens=4, seed=request_id)
        assert served.tokens[request_id, 0] == wanted
    served.add(4, PROMPT, n=2)  # what is scored is cached as anything else
    served.drain()
    assert served.ends[4, 0].num_cached_tokens == 44


def test_scores_while_others_run_and_with_several_choices() -> None:
    served = Served(max_num_batched_tokens=16)
    served.add(1, [5, 6], max_tokens=40, ignore_eos=True, params={"logprobs": 2})
    served.engine.step()
    served.add(2, PROMPT, n=3, max_tokens=9, params={"prompt_logprobs": 0, "logprobs": 1})
    served.add(3, PROMPT[::-1], max_tokens=9, params={"prompt_logprobs": 0})
    served.add(4, [9], max_tokens=9, params={"prompt_logprobs": 0, "logprobs": 0})
    served.drain()
    assert {key: scores for key, scores in served.scores.items() if scores} == {
        (2, 0): oracle_scores(PROMPT),
        (3, 0): oracle_scores(PROMPT[::-1]),
    }
    for choice in range(3):
        seed = fork_seed(2, choice)
        tokens = oracle_continuation(PROMPT, max_tokens=9, seed=seed)
        assert served.tokens[2, choice] == tokens
        assert served.logprobs[2, choice] == wanted_logprobs(tokens, 1)
    assert served.logprobs[1, 0] == wanted_logprobs(served.tokens[1, 0], 2)
    assert served.logprobs[3, 0] == []
    assert served.logprobs[4, 0] == wanted_logprobs(served.tokens[4, 0], 0)


def test_scores_and_logprobs_under_preemption_come_once() -> None:
    served = Served(num_blocks=28, max_num_batched_tokens=16, prefix_cache=False)
    prompts = {request_id: [request_id, *PROMPT[:19]] for request_id in range(1, 7)}
    for request_id, prompt in prompts.items():
        params = {"prompt_logprobs": 0, "logprobs": 1}
        served.add(request_id, prompt, max_tokens=30, ignore_eos=True, params=params)
    served.drain()
    assert served.engine.stats().num_preemptions > 0
    for request_id, prompt in prompts.items():
        tokens = oracle_continuation(prompt, max_tokens=30, seed=request_id, ignore_eos=True)
        assert served.tokens[request_id, 0] == tokens
        assert served.logprobs[request_id, 0] == wanted_logprobs(tokens, 1)
        assert served.scores[request_id, 0] == oracle_scores(prompt)


def test_a_sequence_that_is_preempted_while_it_is_scored() -> None:
    """Somebody urgent takes its blocks half way; what was told isn't told again."""
    served = Served(num_blocks=13, max_num_batched_tokens=8, policy=PriorityPolicy(ageing_s=1000.0))
    served.add(1, PROMPT, max_tokens=4, params={"prompt_logprobs": 0})
    for _ in range(3):
        served.engine.step()
    assert len(served.scores[1, 0]) == 24
    served.add(2, PROMPT[::-1], max_tokens=4, priority=-5, params={"prompt_logprobs": 0})
    served.engine.step()
    assert served.engine.stats().num_preemptions == 1
    served.drain()
    for request_id, prompt in ((1, PROMPT), (2, PROMPT[::-1])):
        assert served.scores[request_id, 0] == oracle_scores(prompt)
        wanted = oracle_continuation(prompt, max_tokens=4, seed=request_id)
        assert served.tokens[request_id, 0] == wanted


@pytest.mark.parametrize("aborted", [0, 1])
def test_an_abort_of_one_choice_while_the_prompt_is_scored(aborted: int) -> None:
    served = Served(max_num_batched_tokens=8)
    served.add(1, PROMPT, n=2, params={"prompt_logprobs": 0})
    for _ in range(2):
        served.engine.step()
    served.abort(1, aborted)
    served.drain()
    told = served.scores[1, 0]
    assert told == oracle_scores(PROMPT)[: len(told)]
    assert len(told) == (16 if aborted == 0 else 44)
    assert not served.scores[1, 1]
    seed = fork_seed(1, 1 - aborted)
    assert served.tokens[1, 1 - aborted] == oracle_continuation(PROMPT, max_tokens=4, seed=seed)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine, _ = make_engine(max_num_batched_tokens=16)
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


def test_over_grpc(client: Client) -> None:
    for _ in range(2):  # a cold and a warm cache
        calls = [
            client.generate(
                token_ids=prompt, n=2, seed=7, max_tokens=6, logprobs=2, prompt_logprobs=0
            )
            for prompt in (PROMPT, [5], PROMPT[::-1])
        ]
        for prompt, call in zip((PROMPT, [5], PROMPT[::-1]), calls, strict=True):
            tokens, logprobs, told = ([], []), ([], []), []
            for response in call:
                told.extend(response.prompt_logprobs)
                assert response.index == 0 or not response.prompt_logprobs
                tokens[response.index].extend(response.token_ids)
                logprobs[response.index].extend(
                    TokenLogprobs(
                        each.logprob,
                        tuple(top.token_id for top in each.top),
                        tuple(top.logprob for top in each.top),
                    )
                    for each in response.logprobs
                )
            assert [each.token_id for each in told] == prompt
            assert not told[0].HasField("logprob")
            assert [each.logprob for each in told[1:]] == [
                each.logprob for each in oracle_scores(prompt)
            ]
            for choice in range(2):
                seed = fork_seed(7, choice)
                assert tokens[choice] == oracle_continuation(prompt, max_tokens=6, seed=seed)
                assert logprobs[choice] == wanted_logprobs(tokens[choice], 2)


def test_offline(llm: LLM) -> None:
    scored = SamplingParams(max_tokens=6, n=2, seed=7, logprobs=1, prompt_logprobs=0)
    plain = SamplingParams(max_tokens=6, seed=7)
    completions = llm.generate([PROMPT, [5], PROMPT], [scored, scored, plain], progress=False)
    first, second, single, _, none = completions
    assert first.prompt_logprobs == (None, *oracle_scores(PROMPT))
    assert second.prompt_logprobs is None
    assert single.prompt_logprobs == (None,)
    assert none.prompt_logprobs is None
    assert none.logprobs is None
    for completion in (first, second, single):
        assert list(completion.logprobs) == wanted_logprobs(list(completion.token_ids), 1)
