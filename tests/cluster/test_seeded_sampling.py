"""A seeded request gets the same tokens alone, in a batch, after a preemption, at TP 1 and 2."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.config import EngineConfig
from runtime.llm import LLM, Completion
from runtime.sampling_params import SamplingParams
from tests.asks import save_model
from tests.builders import demo_model_folder
from tests.families import VOCABULARY
from tests.tiny_engine import check_logprobs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPTS = [[(7 * index + step) % VOCABULARY for step in range(5 + 4 * index)] for index in range(8)]
SCHEMA = '{"type": "array", "items": {"enum": ["red", 20, [null]]}, "minItems": 3, "maxItems": 5}'
# Of each prompt.
KINDS: list[dict[str, Any]] = [
    {},
    {"top_k": 40, "top_p": 0.9},
    {"top_p": 0.8, "prompt_logprobs": 2},
    {"min_p": 0.02, "temperature": 1.5},
    {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
        "logit_bias": {7: 6.0, 9: -50.0},
        "bad_words": ["q", "a b"],
        "logprobs": 5,
    },
    {"n": 3},
    {"json_schema": SCHEMA, "ignore_eos": False, "max_tokens": 40},
    {"min_tokens": 9, "stop_token_ids": tuple(range(20, 60)), "ignore_eos": False},
]


def params(kind: int, seed: int | None) -> SamplingParams:
    fields = {"max_tokens": 24, "temperature": 1.0, "ignore_eos": True, "logprobs": 2}
    return SamplingParams(**fields | KINDS[kind], seed=seed)


def open_llm(model: Path, *, tp: int, kv_memory: int | None = None) -> LLM:
    config = EngineConfig(
        model=str(model),
        tp=tp,
        launcher="local",
        dtype="float32",
        kv_memory=kv_memory,
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=12,
    )
    return LLM.from_config(config, progress=False)


def run_alone(llm: LLM) -> list[Completion]:
    """The completions of one prompt after the other."""
    return [
        completion
        for kind, prompt in enumerate(PROMPTS)
        for completion in llm.generate([prompt], params(kind, seed=kind), progress=False)
    ]


def run_together(llm: LLM) -> list[Completion]:
    """The same in one batch."""
    every = [params(kind, seed=kind) for kind in range(len(KINDS))]
    return llm.generate(PROMPTS, every, progress=False)


def check_equal(found: Sequence[Completion], wanted: Sequence[Completion], bound: float) -> None:
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert [each.text for each in found] == [each.text for each in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        check_logprobs(mine.logprobs, theirs.logprobs, bound)
        told = mine.prompt_logprobs or (), theirs.prompt_logprobs or ()
        check_logprobs(*(each[1:] for each in told), bound)


def check(model: Path, *, tight_kv_memory: int, bound: float) -> None:
    """`bound` of the difference of logprobs."""
    with open_llm(model, tp=1) as llm:
        alone, together = run_alone(llm), run_together(llm)
        assert llm.stats().num_preemptions == 0
        # Batch mates without seeds of their own draw other tokens each time, and disturb nobody.
        unseeded = [params(kind, seed=kind if kind == 0 else None) for kind in range(len(KINDS))]
        mixed = llm.generate(PROMPTS, unseeded, progress=False)
    check_equal(together, alone, bound)
    check_equal(mixed[:1], alone[:1], bound)
    assert [each.token_ids for each in mixed[1:]] != [each.token_ids for each in alone[1:]]
    assert len({each.token_ids for each in alone}) == len(alone), "they draw different texts"
    with open_llm(model, tp=2) as llm:
        check_equal(run_alone(llm), alone, bound)
        check_equal(run_together(llm), alone, bound)
    for tp in (1, 2):
        with open_llm(model, tp=tp, kv_memory=tight_kv_memory // tp) as llm:
            preempted = run_together(llm)
            assert llm.stats().num_preemptions > 0
        check_equal(preempted, alone, bound)


@pytest.mark.full
def test_tiny_llama(tmp_path: Path) -> None:
    # 36 blocks: 4 tokens, 3 layers, K and V of 2 heads of 16 float32 each.
    check(
        save_model(tmp_path / "llama", "llama"),
        tight_kv_memory=36 * 4 * 3 * 2 * 2 * 16 * 4,
        bound=1e-4,
    )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_embedded_model() -> None:
    # Its one KV head is on both ranks, so that TP 2 needs the same bytes; 18 layers.
    check(Path(demo_model_folder()), tight_kv_memory=2 * 36 * 4 * 18 * 2 * 256 * 4, bound=1e-3)
