"""Whole models whose attention is triton's, interpreted: the tokens are the reference's."""

from pathlib import Path

import pytest

from runtime.sampling_params import SamplingParams
from tests.asks import VOCAB_SIZE, draw_prompt, save_model
from tests.local_ranks import load_ranks
from tests.quick import full
from tests.tiny_engine import Answer, Ask, TinyEngine, check_equal

pytestmark = pytest.mark.cpu

FAMILIES = [
    full("llama"),
    "gpt_oss",  # sinks and windows
    full("gemma2"),  # soft caps and windows
    full("llama4"),  # chunks
]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2)
# Longer than the token budget of a step: pieces of it go beside rows that decode.
ASKS = [Ask(prompt=draw_prompt(length, length), params=PARAMS) for length in (45, 3, 16)]


def run(folder: Path, attention: str) -> list[list[Answer]]:
    with load_ranks(folder, attention=attention) as ranks:
        assert ranks[0].executor.spec.attention == attention
        engine = TinyEngine(ranks, preempt_every=4)
        answers = engine.run(*ASKS)
        assert engine.preempted
        assert engine.most_together == len(ASKS)
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_reference(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, family)
    wanted = run(folder, "reference")

    found = run(folder, "triton")

    assert all(token < VOCAB_SIZE for (answer,) in wanted for token in answer.token_ids)
    for mine, theirs in zip(found, wanted, strict=True):
        check_equal(mine, theirs)
