"""Logprobs of prompts are those of the model, whatever was cached, cut up or preempted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.request import TokenLogprobs
from runtime.sampling_params import SamplingParams
from tests.asks import VOCAB_SIZE, batch_mates, draw_prompt, save_model
from tests.local_ranks import Rank, load_ranks
from tests.tiny_engine import Ask, TinyEngine, check_logprobs
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.cpu


def full(value: object):
    return pytest.param(value, marks=pytest.mark.full)


FAMILIES = ["llama", full("gemma3")]
NUM_TOPS = 4
BOUND = 1e-3
PROMPT = draw_prompt(45, 45)
PARAMS = SamplingParams(
    max_tokens=10, prompt_logprobs=NUM_TOPS, logprobs=2, ignore_eos=True, temperature=1.5
)
ASK = Ask(prompt=PROMPT, params=PARAMS, seed=4)
QUIET = SamplingParams(max_tokens=12, ignore_eos=True)

Expect = Callable[[Sequence[int]], list[TokenLogprobs]]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def ranks(folder) -> Iterator[list[Rank]]:
    with load_ranks(folder) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def expect(folder) -> Expect:
    """What transformers tells of a prompt's tokens, from the second on."""
    return expectation(folder)


def expectation(folder: Path) -> Expect:
    torch.set_num_threads(1)  # as the ranks do
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def expect(prompt: Sequence[int]) -> list[TokenLogprobs]:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        logprobs = logits.double().log_softmax(dim=-1)
        tops = logprobs.topk(NUM_TOPS, dim=-1)
        return [
            TokenLogprobs(
                float(logprobs[place, token]),
                tuple(tops.indices[place].tolist()),
                tuple(tops.values[place].tolist()),
            )
            for place, token in enumerate(prompt[1:])
        ]

    return expect


def score_rows(served: TinyEngine) -> list[int]:
    return [len(plan.score_index) for plan in served.executor.plans]


@pytest.mark.parametrize("length", [1, 2, 3, 45])
def test_a_prompt_gets_what_transformers_tells(ranks, expect, length) -> None:
    prompt = PROMPT[:length]

    ((answer,),) = TinyEngine(ranks).run(Ask(prompt=prompt, params=PARAMS))

    assert len(answer.scores) == length - 1
    check_logprobs(answer.scores, expect(prompt), BOUND)
    assert len(answer.token_ids) == len(answer.logprobs) == 10


def test_on_two_ranks_whose_vocabulary_does_not_divide(tmp_path) -> None:
    prompt = [token % 211 for token in PROMPT]
    with load_ranks(save_tiny_model(tmp_path), tp=2) as ranks:
        assert ranks[0].executor.spec.vocab_size % 2 == 1
        ((answer,),) = TinyEngine(ranks).run(Ask(prompt=prompt, params=PARAMS))

    check_logprobs(answer.scores, expectation(tmp_path)(prompt), BOUND)


@pytest.mark.parametrize("chunk", [full(1), 5, full(44), full(45), full(128)])
def test_cold_and_warm_in_chunks_of_any_size(ranks, expect, chunk) -> None:
    """A cache that holds the prompt spares nothing: what is in it has no logits."""
    served = TinyEngine(ranks, max_num_scored_tokens=chunk, max_num_batched_tokens=64)

    ((cold,),) = served.run(ASK)
    ((warm,),) = served.run(ASK)
    served.run(Ask(prompt=PROMPT, params=QUIET))

    for answer in (cold, warm):
        check_logprobs(answer.scores, expect(PROMPT), BOUND)
    assert warm.token_ids == cold.token_ids
    check_logprobs(warm.logprobs, cold.logprobs)
    assert max(score_rows(served)) == min(chunk, 44)
    assert sum(score_rows(served)) == 2 * 44
    assert served.answers[2, 0].num_cached_tokens == 44, "it is cached for others"


def test_a_prompt_without_logprobs_in_the_cache_is_computed_again(ranks, expect) -> None:
    served = TinyEngine(ranks)
    served.run(Ask(prompt=PROMPT, params=QUIET))

    ((answer,),) = served.run(ASK)

    check_logprobs(answer.scores, expect(PROMPT), BOUND)


@pytest.mark.parametrize("num_steps", [full(1), 3, full(5), full(9), 11, full(14)])
def test_a_preemption_tells_nothing_twice(ranks, expect, num_steps) -> None:
    """Of 9 steps over the prompt and 9 more; what was told stays so."""
    ((alone,),) = TinyEngine(ranks).run(ASK)
    served = TinyEngine(ranks, max_num_scored_tokens=5)
    served.add(ASK)
    for _ in range(num_steps):
        served.step()
    (sequence,) = served.scheduler.running.sequences.values()
    served.scheduler.running.preempt(sequence)

    served.run()

    answer = served.answers[0, 0]
    assert sum(score_rows(served)) == 44
    check_logprobs(answer.scores, expect(PROMPT), BOUND)
    assert answer.token_ids == alone.token_ids
    check_logprobs(answer.logprobs, alone.logprobs)


def test_many_preemptions_tell_all_the_same(ranks, folder, expect) -> None:
    options = {"llama": {"num_blocks": 27}, "gemma3": {"preempt_every": 3}}[folder.name]
    served = TinyEngine(ranks, max_num_scored_tokens=8, **options)
    quiet = SamplingParams(max_tokens=30, ignore_eos=True)
    older = [Ask(prompt=draw_prompt(6, seed), params=quiet) for seed in range(3)]
    long = replace(PARAMS, max_tokens=28)
    scored = [Ask(prompt=draw_prompt(30, 77 + n), params=long, seed=n) for n in range(3)]

    answers = served.run(*older, *scored)[3:]

    assert any(who >= 3 for who, _ in served.preempted)
    assert sum(score_rows(served)) == 3 * 29
    for ask, (answer,) in zip(scored, answers, strict=True):
        check_logprobs(answer.scores, expect(ask.prompt), BOUND)
        assert len(answer.logprobs) == len(answer.token_ids) == 28


def test_those_who_want_it_take_turns_and_the_others_go_on(ranks, expect) -> None:
    served = TinyEngine(ranks, max_num_scored_tokens=4, max_num_batched_tokens=64)
    scored = [Ask(prompt=draw_prompt(40, 7 + n), params=PARAMS, seed=n) for n in range(2)]
    mates = batch_mates(seed=8)
    mates = [each for each in mates if not each.params.prompt_logprobs and not each.params.regex]
    alone = [TinyEngine(ranks).run(ask)[0] for ask in mates]

    first, second, *others = served.run(*scored, *mates)

    for ask, (answer,) in zip(scored, (first, second), strict=True):
        check_logprobs(answer.scores, expect(ask.prompt), BOUND)
    assert [each[0].token_ids for each in others] == [each[0].token_ids for each in alone]
    assert max(score_rows(served)) == 4
    # The first prompt takes ten steps; the others decode meanwhile.
    (early,) = (plan for plan in served.executor.plans if plan.step_id == 9)
    assert len(early.sample_index) == len(mates)


def test_of_several_choices_the_first_is_told(ranks, expect) -> None:
    params = SamplingParams(max_tokens=6, prompt_logprobs=NUM_TOPS, n=3, ignore_eos=True)
    (answers,) = TinyEngine(ranks).run(Ask(prompt=PROMPT, params=params))
    check_logprobs(answers[0].scores, expect(PROMPT), BOUND)
    assert answers[1].scores == answers[2].scores == []
    assert [len(each.token_ids) for each in answers] == [6, 6, 6]


def test_logprobs_of_outputs_are_those_of_transformers(ranks, expect) -> None:
    """The output read as a prompt; what sampling parameters do isn't in them."""
    params = SamplingParams(
        max_tokens=12, logprobs=NUM_TOPS, temperature=2.0, top_k=50, logit_bias={5: 9.0}
    )
    ((answer,),) = TinyEngine(ranks).run(Ask(prompt=PROMPT, params=params, seed=9))
    text = [*PROMPT, *answer.token_ids]
    assert 5 in answer.token_ids
    check_logprobs(answer.logprobs, expect(text)[len(PROMPT) - 1 :], BOUND)


def test_no_token_has_minus_infinity(ranks) -> None:
    params = SamplingParams(
        max_tokens=8,
        logprobs=20,
        allowed_token_ids=(5, 6, 7),
        prompt_logprobs=20,
        ignore_eos=True,
    )
    ((answer,),) = TinyEngine(ranks).run(Ask(prompt=PROMPT, params=params))
    for each in [*answer.logprobs, *answer.scores]:
        assert -9999 <= each.logprob <= 0
        assert len(each.top_token_ids) == 20
        assert all(-9999 < value <= 0 for value in each.top_logprobs)
        assert all(0 <= token < VOCAB_SIZE for token in each.top_token_ids)
