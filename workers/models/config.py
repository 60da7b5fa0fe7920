"""What a model folder's configuration files say."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from workers.errors import ModelError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
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
# Names by which configurations tell how far positions reach.
REACHES = (
    "max_position_embeddings",
    "max_target_positions",
    "max_seq_len",
    "model_max_length",
    "seq_length",
)
# Where nothing limits positions, as in ALiBi: what a request may have all the same.
UNLIMITED = 1 << 17


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of the checkpoint in `folder`, with all its parts.

    Raises ModelError: there is no readable config.json, or its weights are quantised.
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
        if "auto_map" in raw:
            raise ModelError(
                f"{path}: model_type {raw.get('model_type')!r} needs code of the checkpoint, which "
                "isn't run: only models that the installed transformers knows are served"
            ) from error
        raise ModelError(f"{path} can't be read: {error}") from error
    return config


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the language model within a checkpoint: its own, or that of a part.

    Raises ModelError: transformers has no causal language model for it.
    """
    try:
        text: PreTrainedConfig = config.get_text_config(decoder=True)
    except ValueError:  # several parts are text
        text = config
    if find_model_class(text) is not None:
        # The whole says whether its head is tied, whatever the part's own configuration says.
        if hasattr(config, "tie_word_embeddings"):
            text.tie_word_embeddings = config.tie_word_embeddings
        return text
    if find_model_class(config) is not None:
        return config
    raise ModelError(
        f"config.json: model_type {config.model_type!r} has no causal language model in "
        "transformers"
    )


def find_model_class(config: PreTrainedConfig) -> Any:
    """The class of a causal language model with this configuration; None where there is none."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # The text part of a model of several parts may have no entry of its own.
    classes: Iterator[Any] = iter(MODEL_FOR_CAUSAL_LM_MAPPING.values())
    return next((each for each in classes if each.config_class is type(config)), None)


def find_whole_class(config: PreTrainedConfig) -> Any:
    """The class of the whole checkpoint, images and all; None where transformers has none."""
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return find_model_class(config)


def resolve_dtype(
    name: str, configs: Sequence[PreTrainedConfig], stored: torch.dtype
) -> torch.dtype:
    """By name; auto is the first that a configuration tells, else that of the stored weights.

    Raises ModelError: unknown, or not a format that models compute in.
    """
    if name == "auto":
        dtype = next((config.dtype for config in configs if config.dtype is not None), stored)
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
            raise ModelError(f"config.json: dtype {dtype} must be one of {', '.join(DTYPES)}")
        return dtype
    if name not in DTYPES:
        raise ModelError(f"dtype={name} must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def max_model_len(config: PreTrainedConfig) -> int:
    """Positions that the model reaches and that every request sees alike.

    LongRoPE has other frequencies past the original positions, for all requests of a batch: so it
    ends there. Dynamic RoPE changes past `max_position_embeddings` alone.

    Raises ModelError: the configuration's number makes no sense.
    """
    named = ((name, getattr(config, name, None)) for name in REACHES)
    name, reach = next((pair for pair in named if pair[1] is not None), ("", UNLIMITED))
    if not isinstance(reach, int) or reach < 1:
        raise ModelError(f"config.json: {name}={reach} must be at least 1")
    rope = getattr(config, "rope_parameters", None) or {}
    for own in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if own.get("rope_type") == "longrope":
            original = own.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            reach = min(reach, original or reach)
    return reach


def eos_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Ids that end a text, of generation_config.json, else of the whole's config.json."""
    told = (getattr(each, "eos_token_id", None) for each in (config, text_part(config)))
    ids = next((each for each in told if each is not None), None)
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
