"""Small copies keep what makes a configuration's kind, and are small."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.full_sizes import (
    REAL,
    deepseek_v3,
    gemma_3_27b,
    gpt_oss_120b,
    llama_3_1_70b,
    llama_4_scout,
    make,
    phi_3_5_mini,
)
from workers.errors import ModelError
from workers.gate.errors import NoReference
from workers.gate.shrink import VOCABULARY, shrink
from workers.gate.strict import LONGEST
from workers.models.config import text_part

pytestmark = pytest.mark.cpu

MAX_PARAMETERS = 3_000_000


# Without a meaning for how a model computes, or the sizes themselves.
UNLIKE = ("max_window_layers", "_name_or_path", "dtype", "transformers_version")


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", REAL)
def test_the_copy_is_small_and_splits(name: str, tp: int) -> None:
    config = REAL[name]()
    whole = text_part(config)
    small = text_part(shrink(config, tp))
    assert type(small) is type(whole)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    limit = MAX_PARAMETERS * max(1, tp / 4) ** 2
    assert sum(parameter.numel() for parameter in model.parameters()) < limit
    assert small.vocab_size == VOCABULARY
    assert small.max_position_embeddings > LONGEST
    # Every rank has heads to itself, or one KV head of all, as the model would have it.
    assert small.num_attention_heads % tp == 0
    assert small.num_attention_heads >= 2
    kv_heads, of_kv_heads = small.num_key_value_heads, whole.num_key_value_heads
    assert small.num_attention_heads % kv_heads == 0
    if of_kv_heads % tp == 0:
        assert kv_heads % tp == 0
    else:
        assert kv_heads <= of_kv_heads
    for field in ("intermediate_size", "moe_intermediate_size", "intermediate_size_mlp"):
        assert (getattr(small, field, None) or 0) % tp == 0


@pytest.mark.parametrize("name", REAL)
def test_the_copy_is_the_same_every_time(name: str) -> None:
    config = REAL[name]()
    before = config.to_dict()
    first, second = shrink(config, 2).to_dict(), shrink(config, 2).to_dict()
    assert first == second
    assert config.to_dict() == before
    assert shrink(shrink(config, 2), 2).to_dict() == first


@pytest.mark.parametrize("name", REAL)
def test_only_sizes_change(name: str) -> None:
    """What isn't a number, or a list of one entry a layer, stays."""
    whole, small = text_part(REAL[name]()), text_part(shrink(REAL[name](), 2))
    before, after = whole.to_dict(), small.to_dict()
    for key, value in before.items():
        if key in UNLIKE:
            continue
        if value is None or isinstance(value, bool | str | float):
            assert after[key] == value, key
        elif isinstance(value, list) and len(value) == whole.num_hidden_layers:
            assert len(after[key]) == small.num_hidden_layers, key


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gemma_3_27b", [*["sliding_attention"] * 5, "full_attention"]),
        ("gpt_oss_120b", ["sliding_attention", "full_attention", "sliding_attention"]),
        ("llama_4_scout", [*["chunked_attention"] * 3, "full_attention"]),
        ("qwen_2_5_half_b", ["full_attention"] * 3),
    ],
)
def test_every_kind_of_layer_is_there(name: str, kinds: list[str]) -> None:
    assert text_part(shrink(REAL[name](), 2)).layer_types == kinds


@pytest.mark.parametrize(
    ("name", "tp", "heads", "kv_heads"),
    [
        ("llama_3_1_70b", 1, 4, 2),  # fewer KV heads than query heads
        ("llama_3_1_70b", 4, 8, 4),
        ("deepseek_v3", 2, 4, 4),  # as many
        ("phi_3_5_mini", 4, 8, 8),
        ("qwen_2_5_half_b", 1, 4, 2),
        ("qwen_2_5_half_b", 2, 4, 2),
        ("qwen_2_5_half_b", 4, 8, 2),  # two ranks share a head
        ("one_kv_head", 1, 4, 1),
        ("one_kv_head", 4, 8, 1),
    ],
)
def test_groups_of_heads(name: str, tp: int, heads: int, kv_heads: int) -> None:
    small = text_part(shrink(REAL[name](), tp))
    assert (small.num_attention_heads, small.num_key_value_heads) == (heads, kv_heads)


def test_stretched_rotary_positions() -> None:
    small = shrink(llama_3_1_70b(), 2)
    assert small.rope_parameters["rope_type"] == "llama3"
    assert small.rope_parameters["factor"] == 8.0
    original = small.rope_parameters["original_max_position_embeddings"]
    assert original > LONGEST
    assert small.max_position_embeddings == 16 * original

    small = shrink(deepseek_v3(), 2)
    assert small.rope_parameters["rope_type"] == "yarn"
    assert small.rope_parameters["mscale_all_dim"] == 1.0
    original = small.rope_parameters["original_max_position_embeddings"]
    assert original > LONGEST
    assert small.max_position_embeddings == 40 * original


def test_long_rope() -> None:
    small = shrink(phi_3_5_mini(), 2)
    rope = small.rope_parameters
    assert rope["rope_type"] == "longrope"
    # As many factors as frequencies, and those of before.
    head_dim = small.hidden_size // small.num_attention_heads
    assert rope["short_factor"] == [1.0 + number / 48 for number in range(head_dim // 2)]
    assert rope["long_factor"] == [1.0 + number for number in range(head_dim // 2)]
    original = small.original_max_position_embeddings
    assert LONGEST < original == rope["original_max_position_embeddings"]
    assert small.max_position_embeddings == 32 * original


def test_rotary_kinds_by_kind_of_layer() -> None:
    rope = text_part(shrink(gemma_3_27b(), 2)).rope_parameters
    assert rope == gemma_3_27b().text_config.rope_parameters


def test_heads_that_are_not_the_width_divided() -> None:
    """Multi-head latent attention has its own dimensions, in proportion."""
    small = shrink(deepseek_v3(), 2)
    assert (small.qk_nope_head_dim, small.qk_rope_head_dim, small.v_head_dim) == (16, 8, 16)
    assert small.num_attention_heads * small.v_head_dim == small.hidden_size
    assert 1 < small.q_lora_rank < small.hidden_size
    assert 1 < small.kv_lora_rank < small.hidden_size


def test_expert_routing() -> None:
    small = shrink(deepseek_v3(), 2)
    assert small.n_routed_experts > small.num_experts_per_tok > 1
    assert small.n_group > small.topk_group >= 1
    assert small.n_routed_experts % small.n_group == 0
    assert small.first_k_dense_replace == 1  # a dense layer, then ones with experts
    small = shrink(llama_4_scout(), 2)
    assert small.num_local_experts > small.num_experts_per_tok == 1
    small = shrink(gpt_oss_120b(), 2)
    assert small.num_local_experts > small.num_experts_per_tok > 1


def test_windows_and_chunks_are_crossed() -> None:
    assert text_part(shrink(gemma_3_27b(), 2)).sliding_window == 8
    small = shrink(llama_4_scout(), 2)
    assert 0 < small.attention_chunk_size < LONGEST
    assert 0 < small.floor_scale < LONGEST


def test_a_kind_of_layer_that_comes_late() -> None:
    late = ["full_attention"] * 20 + ["sliding_attention"] * 10
    small = shrink(make("qwen2", num_hidden_layers=30, layer_types=late), 2)
    assert small.layer_types == late[:21]


def test_kinds_that_are_named_by_number() -> None:
    """The whole has cross attention in some layers: so has the copy."""
    config = make("mllama")
    assert config.text_config.cross_attention_layers[0] == 3
    small = text_part(shrink(config, 2))
    assert small.cross_attention_layers == [3]
    assert small.num_hidden_layers == 4


def test_kinds_by_period_beside_kinds_by_list() -> None:
    small = shrink(make("qwen2_moe", num_hidden_layers=24, decoder_sparse_step=5), 2)
    assert small.num_hidden_layers == 5


def test_kinds_by_layer_configurations() -> None:
    config = make("gemma4_text")
    before, after = config.to_dict(), shrink(config, 2).to_dict()
    assert before["per_layer_config"]["05"] == {"head_dim": 2 * before["head_dim"]}
    assert after["num_hidden_layers"] == 6
    (values,) = after["per_layer_config"].values()
    assert values == {"head_dim": 2 * after["head_dim"]}


def test_layers_that_take_keys_from_earlier_ones() -> None:
    small = shrink(make("gemma3n_text"), 2)
    own = small.num_hidden_layers - small.num_kv_shared_layers
    assert set(small.layer_types[:own]) == set(small.layer_types[own:])
    # Layers with sparse activations, and layers without.
    assert len(set(small.activation_sparsity_pattern)) == 2


def test_a_list_of_sizes_names_no_kinds() -> None:
    sizes = list(range(1000, 1030))
    small = shrink(make("llama", num_hidden_layers=30, sizes_of_layers=sizes), 2)
    assert small.num_hidden_layers == 3
    assert small.sizes_of_layers == sizes[:3]


def test_tokens_that_end_texts_are_in_the_vocabulary_and_images_are_not() -> None:
    small = shrink(llama_3_1_70b(), 2)
    assert small.bos_token_id < VOCABULARY
    assert all(token < VOCABULARY for token in small.eos_token_id)
    whole = shrink(gemma_3_27b(), 2)
    assert whole.image_token_index >= VOCABULARY
    assert whole.boi_token_index >= VOCABULARY


def test_few_layers_stay() -> None:
    assert shrink(make("llama", num_hidden_layers=1), 1).num_hidden_layers == 1
    assert shrink(make("llama", num_hidden_layers=2), 1).num_hidden_layers == 2


def test_quantization_is_left_out() -> None:
    config = llama_3_1_70b()
    config.quantization_config = {"quant_method": "fp8"}
    assert getattr(shrink(config, 2), "quantization_config", None) is None


def test_what_transformers_does_not_take_is_no_reference() -> None:
    config = make("dots3_note_text")
    with pytest.raises(NoReference, match=r"no small copy .* model_type 'dots3_note_text'"):
        shrink(config, 2)
    assert issubclass(NoReference, ModelError)


def test_what_generate_would_do_beside_generating_is_left_out() -> None:
    config = LlamaConfig(use_mtp=True, quantization_config={"quant_method": "fp8"})
    small = shrink(config, 1)
    assert not hasattr(small, "use_mtp")
    assert not hasattr(small, "quantization_config")
