"""What is wrong with tensors that are merged, and what a model has no place for, is named."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.core_model_loading import Chunk, Transpose, WeightConverter

from tests.checkpoints import build_meta, change_tensors, load, match, replace_stored, save_random
from tests.families import SIZES
from workers.errors import ModelError
from workers.loading import naming

pytestmark = pytest.mark.cpu

EXPERTS = 12
EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"


def mixtral(**fields: object) -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**SIZES | {"num_local_experts": EXPERTS} | fields))


def llama(**fields: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES | fields))


@pytest.fixture
def folder(tmp_path):
    """A Mixtral in several files."""
    save_random(mixtral, tmp_path, shard_size="500KB")
    return tmp_path


def refusal(folder: Path, **fields: object) -> str:
    with pytest.raises(ModelError) as refused:
        match(build_meta(lambda: mixtral(**fields)), folder)
    return str(refused.value)


def test_one_member_is_missing(folder):
    replace_stored(folder, **{EXPERT.format(3, "w1"): None})

    assert refusal(folder) == f"the checkpoint in {folder} lacks {EXPERT.format(3, 'w1')}"


def test_one_member_has_another_number(folder):
    """As many as there should be, but each would be paired with another expert's parts."""
    other = torch.ones(96, 64)
    replace_stored(folder, **{EXPERT.format(0, "w1"): None, EXPERT.format(15, "w1"): other})

    assert EXPERT.format(0, "w1") in refusal(folder)


def test_the_last_members_are_missing(folder):
    """Those that are left look complete: the configuration tells how many there should be."""
    replace_stored(folder, **{EXPERT.format(11, part): None for part in ("w1", "w2", "w3")})

    message = refusal(folder)

    assert message.startswith(f"the checkpoint in {folder} lacks model.layers.1.")
    assert ".experts.11.w" in message


def test_many_members_are_missing(folder):
    replace_stored(folder, **{EXPERT.format(number, "w2"): None for number in range(2, 9)})

    named = ", ".join(EXPERT.format(number, "w2") for number in range(2, 7))
    assert refusal(folder) == f"the checkpoint in {folder} lacks {named} and 2 more"


def test_all_members_of_a_kind_are_missing(folder):
    gone = {EXPERT.format(number, "w3"): None for number in range(EXPERTS)}
    replace_stored(folder, **gone)

    message = refusal(folder)

    assert message.startswith(f"the checkpoint in {folder} lacks .experts.*.w3.weight beside ")
    assert message.endswith(EXPERT.format(0, "w1"))


def test_a_whole_group_is_missing(folder):
    replace_stored(folder, **{EXPERT.format(number, "w2"): None for number in range(EXPERTS)})

    assert refusal(folder) == (
        f"the checkpoint in {folder} lacks model.layers.1.mlp.experts.down_proj"
    )


def test_a_member_too_many(folder):
    replace_stored(folder, **{EXPERT.format(12, "w2"): torch.zeros(64, 96)})

    assert refusal(folder) == (
        f"the checkpoint in {folder} has {EXPERT.format(12, 'w2')}, but config.json counts to 11"
    )


@pytest.mark.parametrize(("part", "shape"), [("w1", (96, 65)), ("w2", (64, 95)), ("w3", (96,))])
def test_a_member_of_another_shape(folder, part, shape):
    file = replace_stored(folder, **{EXPERT.format(3, part): torch.zeros(shape)})

    message = refusal(folder)

    assert message.startswith(f"{file}: {EXPERT.format(3, part)} has shape {list(shape)}, but ")
    assert EXPERT.format(0, part) in message


def test_members_that_fit_each_other_but_not_the_model(folder):
    message = refusal(folder, intermediate_size=95)

    assert message.endswith(
        "model.layers.0.block_sparse_moe.experts.0.w1.weight and 23 others make "
        "model.layers.0.mlp.experts.gate_up_proj of shape [12, 192, 64], but config.json makes it "
        "[12, 190, 64]"
    )


def test_a_quantised_member(folder):
    packed = torch.zeros(96, 64, dtype=torch.uint8)
    file = replace_stored(folder, **{EXPERT.format(3, "w1"): packed})

    assert refusal(folder).startswith(f"{file}: {EXPERT.format(3, 'w1')} is stored as U8, must be")


def test_a_tensor_that_is_stored_merged_and_apart(folder):
    name = "model.layers.1.mlp.experts.down_proj"
    file = replace_stored(folder, **{name: torch.zeros(12, 64, 96)})

    assert refusal(folder) == f"{file}: {name} and other tensors are both {name}"


def test_a_tensor_that_two_conversions_make(tmp_path, monkeypatch):
    save_random(llama, tmp_path)
    both = ["self_attn.k_proj.weight", "self_attn.v_proj.weight"]
    converters = [
        WeightConverter(["self_attn.kv.weight"], both, [Chunk(dim=0)]),
        WeightConverter(["self_attn.v.turned"], both[1:], [Transpose(0, 1)]),
    ]
    monkeypatch.setattr(naming, "get_model_conversion_mapping", lambda model: converters)
    layer = "model.layers.1.self_attn."
    change_tensors(
        tmp_path / "model.safetensors",
        **{layer + "k_proj.weight": None, layer + "v_proj.weight": None},
        **{layer + "kv.weight": torch.zeros(64, 64), layer + "v.turned": torch.zeros(64, 32)},
    )

    with pytest.raises(ModelError) as refused:
        match(build_meta(llama), tmp_path)

    assert str(refused.value) == (
        f"{tmp_path / 'model.safetensors'}: {layer}v.turned and other tensors are both "
        f"{layer}v_proj.weight"
    )


def test_parts_that_were_not_built_are_left_aside(tmp_path):
    """By their names in the model, whatever they hold."""
    state = save_random(llama, tmp_path, shard_size="200KB")
    extra = {
        "vision_tower.patch.weight": torch.zeros(2),
        "vision_tower.position_ids": torch.zeros(3, dtype=torch.int64),
        "projector.weight": torch.zeros(2, dtype=torch.int8),
    }
    replace_stored(tmp_path, **extra)

    loaded = load(llama, tmp_path, ignored=["vision_tower.", "projector."])

    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    with pytest.raises(ModelError, match=r"doesn't know: vision_tower\.patch\.weight \(.*\), vis"):
        load(llama, tmp_path, ignored=["projector."])


def test_what_is_left_aside_is_not_missed(tmp_path):
    """Only stored tensors are: a tensor that the model has must come from somewhere."""
    save_random(llama, tmp_path)

    with pytest.raises(ModelError, match=r"lacks model\.layers\.2\.input_layernorm\.weight"):
        load(llama, tmp_path, ignored=["model.layers.2."])


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_tensor_becomes_what_the_model_computes_in(tmp_path, stored):
    state = save_random(mixtral, tmp_path)
    model = mixtral().to(stored)
    model.load_state_dict(state)
    model.save_pretrained(tmp_path)

    loaded = load(lambda: mixtral().to(torch.bfloat16), tmp_path)

    for name, tensor in state.items():
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name], tensor.to(stored).to(torch.bfloat16)), name


def test_tied_tensors_that_lie_in_two_files(tmp_path):
    def build() -> LlamaForCausalLM:
        return llama(tie_word_embeddings=True)

    state = save_random(build, tmp_path, shard_size="200KB")
    embedding = state["model.embed_tokens.weight"]
    replace_stored(tmp_path, **{"lm_head.weight": embedding.clone()})

    loaded = load(build, tmp_path)

    assert loaded["lm_head.weight"].data_ptr() == loaded["model.embed_tokens.weight"].data_ptr()
    assert torch.equal(loaded["lm_head.weight"], embedding)

    file = replace_stored(tmp_path, **{"lm_head.weight": embedding.flip(0)})
    with pytest.raises(ModelError) as refused:
        load(build, tmp_path)
    assert str(refused.value).startswith(
        f"{file}: lm_head.weight differs from model.embed_tokens.weight"
    )
