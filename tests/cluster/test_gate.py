"""Models of a kind that no test knows, from the folder to the tokens or the refusal."""

from pathlib import Path

import pytest
from transformers import BloomConfig, Gemma3Config, Glm4MoeConfig

from runtime.errors import ConfigError
from runtime.llm import LLM
from runtime.sampling_params import SamplingParams
from tests.families import PADDED, SIZES, VOCABULARY
from tests.quick import full
from tests.tiny_models import expect, save_random

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}


@pytest.fixture(autouse=True)
def no_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "config",
    [
        Glm4MoeConfig(**SIZES, **EXPERTS),
        full(
            Gemma3Config(
                text_config={"head_dim": 16, "sliding_window": 6, **PADDED},
                vision_config=VISION,
                image_token_index=VOCABULARY,
                mm_tokens_per_image=4,
            )
        ),
    ],
    ids=["experts", "text-part"],
)
def test_one_that_passes_is_served_on_two_ranks(tmp_path: Path, config: object) -> None:
    folder = save_random(tmp_path / "model", config)
    expected = expect(folder)

    with LLM(str(folder), tp=2, launcher="local", progress=False) as llm:
        params = SamplingParams(max_tokens=len(expected.greedy[0]), temperature=0, ignore_eos=True)
        completions = llm.generate(expected.texts, params, progress=False)

    assert [list(each.token_ids) for each in completions] == expected.greedy
    assert len(list((tmp_path / "cache/lockstep/verdicts").iterdir())) == 1


@pytest.mark.full
def test_one_that_fails_is_refused_before_any_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_random(tmp_path / "model", BloomConfig(vocab_size=64, hidden_size=32, n_head=2))
    started: list[object] = []
    monkeypatch.setattr("runtime.driver.Epochs.start", lambda *_, **__: started.append(1))

    with (
        pytest.raises(ConfigError, match="BloomForCausalLM computes with the attention mask"),
        LLM(str(folder), launcher="local", progress=False),
    ):
        pass

    assert started == []
