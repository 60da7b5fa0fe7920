"""The defaults of sampling parameters that a model brings in its generation_config.json."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError, InvalidRequestError
from runtime.sampling_params import (
    MIN_TEMPERATURE,
    SamplingDefaults,
    SamplingParams,
)

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
ADVICE = "set --generation-config ignore to start without the model's defaults"
REPAIR = "repair the file, or remove it"

# Keys of the file, and our parameters of the same meaning.
PARAMETERS = {
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
# Keys that workers read, and those that don't say what is generated.
OTHER_KEYS = frozenset(
    {
        "_commit_hash",
        "_from_model_config",
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "disable_compile",
        "do_sample",
        "eos_token_id",
        "max_cache_len",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prefill_chunk_size",
        "return_dict_in_generate",
        "transformers_version",
        "use_cache",
    }
)
# Values that ask for nothing, beside null and false.
NEUTRAL: Mapping[str, float] = {
    "diversity_penalty": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "guidance_scale": 1,
    "length_penalty": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "typical_p": 1,
}


def read_defaults(folder: Path) -> SamplingDefaults:
    """The model's defaults; Lockstep's own for what its file leaves out or has as null.

    Raises ConfigError: the file can't be read, or a value isn't one that requests may have.
    """
    path = folder / FILE
    content = read_file(folder)
    values = {
        name: _checked(path, key, name, content[key])
        for key, name in PARAMETERS.items()
        if content.get(key) is not None
    }
    does_sample = content.get("do_sample")
    if not isinstance(does_sample, bool | None):
        raise ConfigError(
            f"{path}: do_sample={does_sample!r} must be true, false or null: {ADVICE}"
        )
    if does_sample is False:  # transformers takes the best token then, whatever the temperature
        values["temperature"] = 0.0
    if names := sorted(key for key, value in content.items() if _is_unmet(key, value)):
        logger.info("%s: not honoured: %s", path, ", ".join(names))
    return SamplingDefaults(**values)


def read_file(folder: Path) -> dict[str, Any]:
    """What the model's file says; nothing where there is none.

    Raises ConfigError: it can't be read. Ignoring its defaults doesn't help then: workers find in
    it the tokens that end a text.
    """
    path = folder / FILE
    if not os.path.lexists(path):  # a link into nowhere was meant to be a file
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}: {REPAIR}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object: {REPAIR}")
    return content


def _checked(path: Path, key: str, name: str, value: Any) -> Any:
    if name == "temperature" and type(value) is float and 0 < value < MIN_TEMPERATURE:
        # Some checkpoints write greedy as 1e-6.
        logger.info("%s: %s=%s is taken as 0, greedy", path, key, value)
        return 0.0
    try:
        SamplingParams(**{name: value})
    except InvalidRequestError as error:
        raise ConfigError(f"{path}: {key}: {error}: {ADVICE}") from error
    return value


def _is_unmet(key: str, value: Any) -> bool:
    if key in PARAMETERS or key in OTHER_KEYS:
        return False
    return value is not None and value is not False and value != NEUTRAL.get(key)
