"""A seeded request gets the same tokens alone, in a batch, after a preemption, at TP 1 and 2."""

from pathlib import Path

import pytest

from runtime.config import EngineConfig
from runtime.llm import LLM
from runtime.sampling_params import SamplingParams
from tests.builders import demo_model_folder
from tests.tiny_models import VOCABULARY, save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPTS = [[(7 * index + step) % VOCABULARY for step in range(5 + 4 * index)] for index in range(8)]


def params(seed: int | None) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=1.0, seed=seed, ignore_eos=True)


def open_llm(model: Path, *, tp: int, kv_memory: int | None = None) -> LLM:
    config = EngineConfig(
        model=str(model),
        tp=tp,
        launcher="local",
        dtype="float32",
        kv_memory=kv_memory,
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=8,
    )
    return LLM.from_config(config, progress=False)


def everything(llm: LLM) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Each prompt's tokens alone, and in one batch of eight."""
    alone = [
        llm.generate([prompt], params(seed), progress=False)[0].token_ids
        for seed, prompt in enumerate(PROMPTS)
    ]
    every = [params(seed) for seed in range(len(PROMPTS))]
    together = [each.token_ids for each in llm.generate(PROMPTS, every, progress=False)]
    return alone, together


def check(model: Path, *, tight_kv_memory: int) -> None:
    with open_llm(model, tp=1) as llm:
        alone, together = everything(llm)
        assert llm.stats().num_preemptions == 0
        # Batch mates without seeds of their own draw other tokens each time, and disturb nobody.
        unseeded = [params(0), *[params(None)] * 7]
        mixed = llm.generate(PROMPTS, unseeded, progress=False)
    assert together == alone
    assert mixed[0].token_ids == alone[0]
    assert [each.token_ids for each in mixed[1:]] != alone[1:]
    assert len(set(alone)) == len(alone), "temperature 1 draws different texts"
    with open_llm(model, tp=2) as llm:
        assert everything(llm) == (alone, alone)
    for tp in (1, 2):
        with open_llm(model, tp=tp, kv_memory=tight_kv_memory // tp) as llm:
            _, preempted = everything(llm)
            assert llm.stats().num_preemptions > 0
        assert preempted == alone


def test_tiny_llama(tmp_path: Path) -> None:
    # 36 blocks: 4 tokens, 3 layers, K and V of 2 heads of 16 float32 each.
    check(save_tiny_model(tmp_path), tight_kv_memory=36 * 4 * 3 * 2 * 2 * 16 * 4)


@pytest.mark.full
def test_embedded_model() -> None:
    # Its one KV head is on both ranks, so that TP 2 needs the same bytes; 18 layers.
    check(Path(demo_model_folder()), tight_kv_memory=2 * 36 * 4 * 18 * 2 * 256 * 4)
