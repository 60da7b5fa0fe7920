"""From a model folder to the transformers module, without weights."""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from workers.errors import ModelError
from workers.layers import paged_attention

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Classes whose tokens and logits our tests compare with transformers'.
CHECKED_CLASSES = frozenset(
    {
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "BioGptForCausalLM",
        "BitNetForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "Ernie4_5ForCausalLM",
        "Exaone4ForCausalLM",
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "GlmForCausalLM",
        "HeliumForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HyperCLOVAXForCausalLM",
        "Jais2ForCausalLM",
        "LlamaForCausalLM",
        "Ministral3ForCausalLM",
        "MinistralForCausalLM",
        "MistralForCausalLM",
        "NanoChatForCausalLM",
        "OPTForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "PersimmonForCausalLM",
        "Phi3ForCausalLM",
        "PhiForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
        "VaultGemmaForCausalLM",
    }
)
# What transformers raises on a configuration that makes no sense, or that it can't do.
TRANSFORMERS_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
# Their frequencies depend on the longest sequence of the batch: a request's tokens would depend
# on its batch mates.
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of the text model in `folder`.

    Raises ModelError: there is no readable config.json, or the model's kind isn't served.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} doesn't exist")
    if not path.is_file():
        raise ModelError(f"{path} is missing: give a folder of a Hugging Face model")
    raw = _read_json(path)
    if raw.get("quantization_config") is not None:
        raise ModelError(f"{path}: quantization_config isn't built; use an unquantised checkpoint")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except TRANSFORMERS_ERRORS as error:
        raise ModelError(f"{path} can't be read: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{path}: model_type {config.model_type!r} has no causal language model in transformers"
        )
    # A model of several parts names a class that takes the text part's configuration alone.
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class.config_class in config.sub_configs.values():
        config = config.get_text_config()
    _check_rotary(config)
    return config


def resolve_dtype(name: str, config: PreTrainedConfig) -> torch.dtype:
    """Raises ModelError: unknown, or not a format that models compute in."""
    if name == "auto":
        dtype = config.dtype or torch.float32
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
            raise ModelError(f"config.json: dtype {dtype} must be one of {', '.join(DTYPES)}")
        return dtype
    if name not in DTYPES:
        raise ModelError(f"dtype={name} must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def build_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The module on the meta device, its attention ours, in evaluation mode.

    Raises ModelError: transformers can't build it.
    """
    paged_attention.register()
    auto_class: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = auto_class.from_config(
                config,
                dtype=dtype,
                attn_implementation=paged_attention.NAME,
                trust_remote_code=False,
            )
    except TRANSFORMERS_ERRORS as error:
        raise ModelError(
            f"transformers can't build model_type {config.model_type!r}: {error}"
        ) from error
    name = type(model).__name__
    if name not in CHECKED_CLASSES:
        logger.warning("%s was never compared with transformers: check its outputs", name)
    model.train(False).requires_grad_(False)
    _keep_in_float32(model, dtype)
    return model


def _keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Widens what the class computes with in float32, such as the scores that pick experts."""
    parts = set(model._keep_in_fp32_modules_strict or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        parts |= set(model._keep_in_fp32_modules or ())
    patterns = [re.compile(re.escape(part).replace(r"\*", ".*")) for part in parts]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(pattern.search(name) for pattern in patterns):
            tensor.data = tensor.data.float()


def initialize_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Gives values to the buffers that no checkpoint holds, such as rotary frequencies.

    The parameters have theirs. Raises ModelError: a buffer is left without values.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    computed: list[tuple[str, torch.nn.Module, str]] = []
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                continue
            fresh = torch.empty_like(buffer, device="cpu")
            if fresh.is_floating_point():
                fresh.fill_(float("nan"))
            setattr(module, name, fresh)
            computed.append((f"{path}.{name}", module, name))
    model.initialize_weights()  # type: ignore[no-untyped-call]
    for path, module, name in computed:
        buffer = module.get_buffer(name)
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise ModelError(f"{type(model).__name__}: nothing gives values to buffer {path}")
        setattr(module, name, buffer.to(device))


def max_model_len(config: PreTrainedConfig) -> int:
    """Positions the model reaches. Raises ModelError: the configuration doesn't say."""
    reach = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(reach, int) or reach < 1:
        raise ModelError(
            f"config.json: max_position_embeddings={reach} must be at least 1: models without a "
            "longest position aren't served"
        )
    return reach


def eos_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Ids that end a text, of generation_config.json, else of config.json; may be none."""
    ids = config.get_text_config().eos_token_id
    path = folder / "generation_config.json"
    if path.is_file():
        ids = _read_json(path).get("eos_token_id", ids)
    listed = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) for token in listed):
        raise ModelError(f"{folder}: eos_token_id={ids} must be a token id or a list of them")
    return tuple(listed)


def count_token_ids(folder: Path, num_embeddings: int, eos_token_ids: Sequence[int]) -> int:
    """Ids from 0 on that may be sampled: to the last one of tokenizer.json, or that ends a text.

    Checkpoints round their embeddings up; what is past the tokenizer stands for nothing. Without a
    tokenizer.json every embedding counts. Raises ModelError: it is no tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return num_embeddings
    tokenizer = _read_json(path)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        last = max([*ids, *(token["id"] for token in tokenizer["added_tokens"]), *eos_token_ids])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is no tokenizer: {error!r}") from error
    return min(num_embeddings, int(last) + 1)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def _check_rotary(config: PreTrainedConfig) -> None:
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    per_layer_kind = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in (rope, *per_layer_kind):
        kind = parameters.get("rope_type", "default")
        if kind in BATCH_DEPENDENT_ROPE:
            raise ModelError(
                f"config.json: rope_type {kind!r} isn't served: its positions depend on the "
                "other requests of a batch"
            )
