"""One tiny configuration for each family of models that the tests compare with transformers.

`TYPES` are those that are served without the gate's test; the others are variants of them.
"""

from collections.abc import Callable, Mapping

from transformers import (
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

VOCABULARY = 211  # a prime: no number of ranks divides it
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PADDED = SIZES | {"pad_token_id": 0}

FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "cohere": lambda: CohereConfig(**PADDED, logit_scale=0.3, use_qk_norm=True),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
    "deepseek_v3-whole-queries": lambda: DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=3,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
    ),
    "gemma2": lambda: Gemma2Config(
        **PADDED,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=5,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **PADDED | {"num_hidden_layers": 4},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=7,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=256,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "gpt2-scaled": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=256,
        bos_token_id=None,
        eos_token_id=None,
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "granite": lambda: GraniteConfig(
        **SIZES,
        embedding_multiplier=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.1,
        logits_scaling=1.5,
    ),
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-one-kv-head": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "llama-biased": lambda: LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama4": lambda: Llama4TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 1, 1, 0],
        attention_chunk_size=8,
        floor_scale=8,
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=6),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "opt-projected": lambda: OPTConfig(
        **PADDED, ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False
    ),
    "opt": lambda: OPTConfig(**PADDED, ffn_dim=96, word_embed_proj_dim=64),
    "phi3": lambda: Phi3Config(**PADDED, partial_rotary_factor=0.5),
    "phi3-longrope": lambda: Phi3Config(
        **PADDED | {"max_position_embeddings": 1024},
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8],
            "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
            "original_max_position_embeddings": 256,
        },
    ),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-window": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
    ),
    "smollm3": lambda: SmolLM3Config(**PADDED, no_rope_layers=[1, 0, 1]),
}
TYPES = frozenset(make().model_type for make in FAMILIES.values())
