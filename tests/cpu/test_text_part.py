"""Checkpoints with parts for images: their text part is served, as the whole computes it."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.checkpoints import change_tensors
from tests.families import SIZES, VOCABULARY
from tests.tiny_models import BOUND, Feeder, error_in_std, forced_logits, load_executor
from workers.errors import ModelError
from workers.loading.text_part import text_tensors

pytestmark = pytest.mark.cpu

LLAMA = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
OPT = ("model.decoder.embed_tokens.weight", "model.decoder.layers.0.fc1.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("stored", "names"),
    [
        (
            (
                "language_model.model.embed_tokens.weight",
                "language_model.model.layers.0.mlp.up_proj.weight",
                "language_model.lm_head.weight",
                "vision_tower.vision_model.embeddings.patch_embedding.weight",
                "multi_modal_projector.linear_1.weight",
            ),
            LLAMA,
        ),
        (
            (
                "model.language_model.embed_tokens.weight",
                "model.language_model.layers.0.mlp.up_proj.weight",
                "lm_head.weight",
                "model.visual.blocks.0.attn.qkv.weight",
            ),
            LLAMA,
        ),
        (
            (
                "model.text_model.embed_tokens.weight",
                "model.text_model.layers.0.mlp.up_proj.weight",
                "lm_head.weight",
                "model.connector.modality_projection.proj.weight",
            ),
            LLAMA,
        ),
        (
            (
                "language_model.model.decoder.embed_tokens.weight",
                "language_model.model.decoder.layers.0.fc1.weight",
                "language_model.lm_head.weight",
                "qformer.layernorm.weight",
            ),
            OPT,
        ),
    ],
    ids=["language-model", "inner-language-model", "text-model", "decoder"],
)
def test_text_has_the_names_of_a_language_model(
    stored: tuple[str, ...], names: tuple[str, ...]
) -> None:
    found = text_tensors({name: name for name in stored}, names)
    assert dict(zip(names, stored, strict=False)) == found


def test_a_tied_head_is_not_missed() -> None:
    found = text_tensors({"language_model.model.embed_tokens.weight": 1}, LLAMA[:2])
    assert found == {"model.embed_tokens.weight": 1}


@pytest.mark.parametrize(
    ("stored", "names"),
    [
        (LLAMA, LLAMA),
        ((*LLAMA, "visual.blocks.0.norm.weight"), LLAMA),
        # A model that is served with its parts, the ones for images left out.
        (("model.language_model.embed_tokens.weight",), ("model.language_model.norm.weight",)),
    ],
)
def test_other_checkpoints_are_left_alone(stored: tuple[str, ...], names: tuple[str, ...]) -> None:
    tensors = {name: name for name in stored}
    assert text_tensors(tensors, names) == tensors


TEXT = {
    **SIZES,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WHOLES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": lambda: Gemma3Config(
        text_config=TEXT | {"head_dim": 16, "query_pre_attn_scalar": 16, "pad_token_id": 0},
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=VOCABULARY + 1,
    ),
    "llava": lambda: LlavaConfig(
        text_config=SIZES | {"model_type": "llama"},
        vision_config=VISION | {"model_type": "clip_vision_model", "projection_dim": 32},
        image_token_index=VOCABULARY + 1,
    ),
}


def save_whole(folder: Path, name: str) -> PreTrainedModel:
    config = WHOLES[name]()
    model = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.25
            parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", WHOLES)
def test_text_is_computed_as_by_the_whole(tmp_path: Path, name: str) -> None:
    model = save_whole(tmp_path, name)
    draw = random.Random(5)
    texts = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (35, 19)]
    with torch.inference_mode():
        expected = [model(input_ids=torch.tensor([text])).logits[0].clone() for text in texts]
    progress: list[tuple[int, int]] = []

    executor = load_executor(tmp_path, on_progress=lambda *report: progress.append(report))
    found = forced_logits(Feeder(executor), texts)

    assert found is not None
    assert error_in_std(found, expected) < BOUND
    # Nothing of the part for images was read.
    assert progress[-1] == (executor.spec.parameter_bytes, executor.spec.parameter_bytes)
    assert executor.spec.parameter_bytes < sum(each.nbytes for each in model.parameters())


def test_a_missing_tensor_of_the_text_is_named(tmp_path: Path) -> None:
    save_whole(tmp_path, "llava")
    name = "language_model.model.layers.1.mlp.down_proj.weight"
    change_tensors(tmp_path / "model.safetensors", **{name: None})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight"):
        load_executor(tmp_path)


def test_a_missing_tensor_of_an_image_is_not_missed(tmp_path: Path) -> None:
    save_whole(tmp_path, "llava")
    change_tensors(tmp_path / "model.safetensors", **{"multi_modal_projector.linear_1.bias": None})
    assert load_executor(tmp_path).spec.architecture == "LlamaForCausalLM"
