"""A configuration says what the file says, whatever transformers made of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

pytest.importorskip("gguf", reason="the gguf extra isn't installed")

from workers.errors import ModelError
from workers.gguf.configuration import complete_configuration
from workers.gguf.file import GgufFile

pytestmark = pytest.mark.cpu


def complete(config: PreTrainedConfig, **told: Any) -> PreTrainedConfig:
    """`told` are keys of the file, with __ for a dot."""
    keys = {f"any.{name.replace('__', '.')}": value for name, value in told.items()}
    metadata = {"general.architecture": "any"} | keys
    complete_configuration(config, GgufFile(path=Path("x.gguf"), metadata=metadata, tensors={}))
    return config


@pytest.mark.parametrize(
    ("config", "key", "value", "name", "expected"),
    [
        (Qwen3Config(), "attention__key_length", 64, "head_dim", 64),
        (Phi3Config(), "attention__sliding_window", 2047, "sliding_window", 2047),
        (Phi3Config(sliding_window=9), "attention__sliding_window", 0, "sliding_window", None),
        (Gemma2Config(), "final_logit_softcapping", 20.0, "final_logit_softcapping", 20.0),
        (Starcoder2Config(), "attention__layer_norm_epsilon", 1e-6, "norm_epsilon", 1e-6),
        (NemotronConfig(), "attention__layer_norm_epsilon", 1e-6, "norm_eps", 1e-6),
        (GPT2Config(), "context_length", 2048, "n_positions", 2048),
        # One value for each layer.
        (LlamaConfig(), "attention__head_count_kv", np.array([4] * 32), "num_key_value_heads", 4),
    ],
)
def test_a_key_sets_its_attribute(
    config: PreTrainedConfig, key: str, value: Any, name: str, expected: Any
) -> None:
    assert getattr(complete(config, **{key: value}), name) == expected


def test_numbers_are_those_that_were_meant() -> None:
    told = float(np.float32(1e-6))
    assert complete(LlamaConfig(), attention__layer_norm_rms_epsilon=told).rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("config", "told", "expected"),
    [
        (Starcoder2Config(), {"rope__freq_base": 1e5}, {"rope_theta": 1e5}),
        (
            Phi3Config(),
            {"rope__dimension_count": 72, "rope__scaling__original_context_length": 4096},
            {"partial_rotary_factor": 0.75},
        ),
        (
            LlamaConfig(),
            {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            Qwen2Config(),
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 32768,
                "rope__scaling__yarn_beta_fast": 16.0,
                "rope__scaling__finetuned": True,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "beta_fast": 16.0,
            },
        ),
        (LlamaConfig(), {"rope__scaling__type": "none"}, {}),
    ],
)
def test_rotary_settings_are_the_files(
    config: PreTrainedConfig, told: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = dict(config.rope_parameters)
    assert complete(config, **told).rope_parameters == before | expected


def test_kinds_of_layers_are_the_files() -> None:
    sliding, full = "sliding_attention", "full_attention"
    config = Gemma3TextConfig(num_hidden_layers=3)
    assert complete(
        config, attention__sliding_window_pattern=np.array([False, True, False])
    ).layer_types == [full, sliding, full]
    assert complete(config, attention__sliding_window_pattern=2).layer_types == [
        sliding,
        full,
        sliding,
    ]


@pytest.mark.parametrize(
    ("config", "num_layers", "expected"),
    [
        (Gemma2Config(hidden_size=4608, num_attention_heads=32, head_dim=128), 46, 144),
        (Gemma2Config(hidden_size=3584, num_attention_heads=16, head_dim=256), 42, 256),
        (Gemma3TextConfig(hidden_size=5376, num_attention_heads=32, head_dim=128), 62, 168),
        (Gemma3TextConfig(hidden_size=3840, num_attention_heads=16, head_dim=256), 48, 256),
    ],
)
def test_gemmas_largest_models_scale_otherwise(
    config: PreTrainedConfig, num_layers: int, expected: int
) -> None:
    """Scales as in the configurations that Google published."""
    assert complete(config, block_count=num_layers).query_pre_attn_scalar == expected


def test_a_window_that_no_file_tells_is_none() -> None:
    assert complete(MistralConfig()).sliding_window is None
    assert complete(MistralConfig(), attention__sliding_window=64).sliding_window == 64


def test_special_tokens_are_the_files_or_none() -> None:
    assert complete(Phi3Config()).pad_token_id is None


@pytest.mark.parametrize(
    ("config", "told", "sentence"),
    [
        (LlamaConfig(), {"logit_scale": 0.5}, r"any\.logit_scale=0\.5 has no place in LlamaConfig"),
        (
            LlamaConfig(),
            {"attention__head_count_kv": np.array([4, 8])},
            r"head_count_kv=\[4, 8\] differs by layer",
        ),
        (Qwen2Config(), {"attention__sliding_window": 8}, "=8 is a window, and qwen2 has none"),
        (Qwen2Config(), {"attention__key_length": 64}, "key_length=64 has no place in Qwen2Config"),
        (LlamaConfig(), {"rope__dimension_count": 64}, "must be the head's size, 128, here"),
        (LlamaConfig(), {"rope__freq_base_swa": 1e4}, "freq_base_swa=10000.0 has no place"),
        (GPT2Config(), {"rope__freq_base": 1e4}, "has no place in GPT2Config"),
        (LlamaConfig(), {"rope__scaling__type": "longrope"}, "type='longrope' with {}"),
        (
            LlamaConfig(),
            {"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 1.0},
            "type='yarn' with {'yarn_ext_factor': 1.0} can't be converted",
        ),
        (
            LlamaConfig(),
            {"attention__sliding_window_pattern": 2},
            "sliding_window_pattern=.* has no place",
        ),
    ],
)
def test_what_has_no_place_is_refused(
    config: PreTrainedConfig, told: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        complete(config, **told)
