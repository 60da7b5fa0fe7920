"""Configurations of published models, as large as they are."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig


def make(kind: str, **values: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[kind](**values)
    return config


def llama_3_1_70b() -> PreTrainedConfig:
    return make(
        "llama",
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        bos_token_id=128000,
        eos_token_id=[128001, 128008, 128009],
        dtype="bfloat16",
    )


def gemma_3_27b() -> PreTrainedConfig:
    return make(
        "gemma3",
        text_config={
            "vocab_size": 262208,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "sliding_window": 1024,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    )


def deepseek_v3() -> PreTrainedConfig:
    return make(
        "deepseek_v3",
        vocab_size=129280,
        num_hidden_layers=61,
        max_position_embeddings=163840,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    )


def phi_3_5_mini() -> PreTrainedConfig:
    return make(
        "phi3",
        num_key_value_heads=32,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        sliding_window=262144,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + number / 48 for number in range(48)],
            "long_factor": [1.0 + number for number in range(48)],
        },
    )


def qwen_2_5_half_b() -> PreTrainedConfig:
    return make(
        "qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )


def gpt_oss_120b() -> PreTrainedConfig:
    return make("gpt_oss", num_hidden_layers=36, num_local_experts=128)


def llama_4_scout() -> PreTrainedConfig:
    return make("llama4_text", num_hidden_layers=48, num_local_experts=16)


def one_kv_head() -> PreTrainedConfig:
    return make("gemma", num_hidden_layers=18, num_attention_heads=8, num_key_value_heads=1)


REAL: Mapping[str, Callable[[], PreTrainedConfig]] = {
    each.__name__: each
    for each in (
        llama_3_1_70b,
        gemma_3_27b,
        deepseek_v3,
        phi_3_5_mini,
        qwen_2_5_half_b,
        gpt_oss_120b,
        llama_4_scout,
        one_kv_head,
    )
}
