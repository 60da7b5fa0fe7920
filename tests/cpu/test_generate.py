"""Greedy texts under every parameter that transformers' generate() has too: token for token."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime.request import FinishReason
from runtime.sampling_params import SamplingParams
from tests.asks import EOS, VOCAB_SIZE, batch_mates, draw_prompt, save_model
from tests.local_ranks import Rank, load_ranks
from tests.quick import quick
from tests.tiny_engine import Ask, TinyEngine

pytestmark = pytest.mark.cpu

NUM_NEW = 24
PROMPTS = [draw_prompt(length, 100 + length) for length in (1, 6, 40)]
SOME = list(range(0, VOCAB_SIZE, 3))
BIAS = {token: 3.5 if token % 2 else -20.0 for token in range(30, 90)}
ENDS = tuple(range(3, VOCAB_SIZE, 8))
# What generate() takes, and how it is said here.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "repetition": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "repetition that likes it": ({"repetition_penalty": 0.8}, {"repetition_penalty": 0.8}),
    "bias": ({"sequence_bias": {(t,): b for t, b in BIAS.items()}}, {"logit_bias": BIAS}),
    "allowed": (
        {"prefix_allowed_tokens_fn": lambda batch, ids: SOME},
        {"allowed_token_ids": tuple(SOME)},
    ),
    "ends": ({"eos_token_id": [EOS, *ENDS]}, {"stop_token_ids": ENDS}),
    "late ends": (
        {"eos_token_id": [EOS, *ENDS], "min_new_tokens": 9},
        {"stop_token_ids": ENDS, "min_tokens": 9},
    ),
    "all": (
        {
            "repetition_penalty": 1.3,
            "sequence_bias": {(t,): b for t, b in BIAS.items()},
            "eos_token_id": [EOS, *ENDS],
            "min_new_tokens": 11,
            "prefix_allowed_tokens_fn": lambda batch, ids: [*SOME, EOS],
        },
        {
            "repetition_penalty": 1.3,
            "logit_bias": BIAS,
            "stop_token_ids": ENDS,
            "min_tokens": 11,
            "allowed_token_ids": (*SOME, EOS),
        },
    ),
}

Generate = Callable[..., list[int]]


@pytest.fixture(scope="module", params=quick(["llama", "mistral"], "llama"))
def folder(request, tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def ranks(folder) -> Iterator[list[Rank]]:
    with load_ranks(folder) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def generate(folder) -> Generate:
    torch.set_num_threads(1)  # as the ranks do
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(prompt: list[int], **options: Any) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NUM_NEW,
                pad_token_id=0,
                **options,
            )
        return output[0, len(prompt) :].tolist()

    return generate


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_NEW, temperature=0, **params)


def served_tokens(ranks: list[Rank], asks: list[Ask]) -> list[list[int]]:
    """Of requests side by side with others, of which some are preempted."""
    served = TinyEngine(ranks, preempt_every=9)
    mates = [each for each in batch_mates(seed=5) if not each.params.regex]
    served.run(*asks, *mates)
    assert served.preempted
    return [served.answers[number, 0].token_ids for number in range(len(asks))]


@pytest.mark.parametrize("case", quick(CASES, "all"))
def test_parameters_do_what_they_do_there(ranks, generate, case) -> None:
    theirs, ours = CASES[case]
    asks = [Ask(prompt=prompt, params=greedy(**ours)) for prompt in PROMPTS]
    wanted = [generate(prompt, **theirs) for prompt in PROMPTS]
    assert served_tokens(ranks, asks) == wanted
    if theirs:
        assert wanted != [generate(prompt) for prompt in PROMPTS]
    if "ends" in case:
        assert any(tokens[-1] in ENDS for tokens in wanted)


def test_bad_words_of_one_token_and_more(ranks, generate) -> None:
    """Taken from what comes without them, so that each of them changes something."""
    asks, wanted = [], []
    for prompt in PROMPTS:
        free = generate(prompt)
        words = (tuple(free[:1]), tuple(free[3:5]), tuple(free[8:11]), (prompt[-1], free[0]))
        wanted.append(generate(prompt, bad_words_ids=[list(word) for word in words]))
        assert wanted[-1] != free
        asks.append(Ask(prompt=prompt, params=greedy(), bad_words=words))
    assert served_tokens(ranks, asks) == wanted


def test_a_bad_word_may_begin_in_the_prompt(ranks, generate) -> None:
    prompt = PROMPTS[2]
    first = generate(prompt)[0]
    words = ((*prompt[-3:], first),)
    wanted = generate(prompt, bad_words_ids=[list(word) for word in words])
    assert wanted[0] != first
    assert served_tokens(ranks, [Ask(prompt=prompt, params=greedy(), bad_words=words)]) == [wanted]


@pytest.mark.parametrize("least", quick([8, 9, 10], 9))
def test_an_end_may_not_come_before_the_least_length(ranks, generate, least) -> None:
    """What would be the ninth token ends the text: of more than eight it may be no part."""
    asks, wanted = [], []
    for prompt in PROMPTS:
        ninth = generate(prompt)[8]
        wanted.append(generate(prompt, eos_token_id=[EOS, ninth], min_new_tokens=least))
        params = greedy(stop_token_ids=(ninth,), min_tokens=least)
        asks.append(Ask(prompt=prompt, params=params))
    assert served_tokens(ranks, asks) == wanted
    assert any(len(tokens) == 9 for tokens in wanted) == (least == 8)


def test_every_end_of_generation_config_ends(folder, generate, tmp_path) -> None:
    prompt = PROMPTS[1]
    free = generate(prompt)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, {free[9]}]}}')

    with load_ranks(tmp_path) as ranks:
        ((ended,), (held,), (ignoring,)) = TinyEngine(ranks).run(
            Ask(prompt=prompt, params=greedy()),
            Ask(prompt=prompt, params=greedy(min_tokens=15)),
            Ask(prompt=prompt, params=greedy(ignore_eos=True)),
        )

    ends = {"eos_token_id": [EOS, free[9]]}
    assert ended.token_ids == generate(prompt, **ends)
    assert ended.finish_reason is FinishReason.STOP
    assert held.token_ids == generate(prompt, min_new_tokens=15, **ends)
    assert ignoring.token_ids == generate(prompt, eos_token_id=None)
    assert len(ignoring.token_ids) == NUM_NEW
