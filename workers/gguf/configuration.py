"""Makes a model's configuration say what its GGUF file says.

transformers leaves out some keys of a file, and the defaults of its classes are those of one
checkpoint: a model with another window or rotary base would answer, and answer wrongly. A key that
has no place in the configuration is refused for the same reason.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from workers.errors import ModelError
from workers.gguf.file import GgufFile

if TYPE_CHECKING:
    # It takes 2 s, and a wrong file should be refused at once.
    from transformers import PreTrainedConfig

# Keys without their architecture, and what classes call them; the first that a class has is meant.
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": (
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ),
}
# How tensors were laid out before they were written, which their readers know.
UNUSED = {"tensor_data_layout"}
PATTERN = "attention.sliding_window_pattern"
# Of rotary scaling by YaRN.
YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
FREQUENCIES = "rope_freqs.weight"
# What Llama 3.1 and later have beside the factor; a file holds only what comes of them.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Gemma's largest models scale their queries by hidden size over heads, the others by the head's
# size. A file doesn't tell; llama.cpp goes by the number of layers, too.
SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3_text": 62}


def complete_configuration(config: "PreTrainedConfig", gguf: GgufFile) -> None:
    """Sets in `config` whatever `gguf` says. Raises ModelError: a key has no place there."""
    prefix = f"{gguf['general.architecture']}."
    told = {
        key.removeprefix(prefix): value
        for key, value in gguf.metadata.items()
        if key.startswith(prefix)
    }
    rope = {key: told.pop(key) for key in list(told) if key.startswith("rope.")}
    pattern = told.pop(PATTERN, None)
    for key, value in told.items():
        if key not in UNUSED:
            _set(config, gguf, key, _scalar(gguf, key, value))
    if pattern is not None:
        _set_layer_types(config, gguf, pattern)
    if rope:
        _set_rope(config, gguf, rope)
    if FREQUENCIES in gguf.tensors:
        _set_frequencies(config, gguf)
    _set_family(config, told)
    for name, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = gguf.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        setattr(config, f"{name}_token_id", token)


def decimal(value: float) -> float:
    """The shortest decimal that is `value` in float32: 1e-06 for 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _refuse(gguf: GgufFile, key: str, value: object, reason: str) -> ModelError:
    architecture = gguf["general.architecture"]
    return ModelError(f"{gguf.path}: {architecture}.{key}={value!r} {reason}")


def _scalar(gguf: GgufFile, key: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if len(set(value.tolist())) != 1:
            raise _refuse(gguf, key, value.tolist(), "differs by layer, which can't be converted")
        value = value[0].item()
    return decimal(value) if isinstance(value, float) else value


def _set(config: "PreTrainedConfig", gguf: GgufFile, key: str, value: Any) -> None:
    if key == "attention.sliding_window":
        value = value or None
        if value is not None and getattr(config, "use_sliding_window", None) is False:
            raise _refuse(gguf, key, value, f"is a window, and {config.model_type} has none")
    names = [name for name in ATTRIBUTES.get(key, ()) if hasattr(config, name)]
    if names:
        setattr(config, names[0], value)
    elif not (key in ATTRIBUTES and "head_dim" in ATTRIBUTES[key] and value == _head_dim(config)):
        raise _refuse(gguf, key, value, f"has no place in {type(config).__name__}")


def _head_dim(config: "PreTrainedConfig") -> int:
    given: int | None = getattr(config, "head_dim", None)
    return given or int(config.hidden_size // config.num_attention_heads)


def _set_layer_types(config: "PreTrainedConfig", gguf: GgufFile, pattern: Any) -> None:
    """A number means that each so many-th layer sees all tokens."""
    num_layers = config.num_hidden_layers
    if not isinstance(pattern, np.ndarray):
        if pattern < 1:
            raise _refuse(gguf, PATTERN, pattern, "must be at least 1")
        pattern = np.arange(1, num_layers + 1) % pattern != 0
    if len(pattern) != num_layers or getattr(config, "layer_types", None) is None:
        raise _refuse(gguf, PATTERN, pattern.tolist(), f"has no place in {type(config).__name__}")
    config.layer_types = [
        "sliding_attention" if sliding else "full_attention" for sliding in pattern
    ]


def _set_rope(config: "PreTrainedConfig", gguf: GgufFile, rope: Mapping[str, Any]) -> None:
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:
        key, value = next(iter(rope.items()))
        raise _refuse(gguf, key, value, f"has no place in {type(config).__name__}")
    full = parameters.get("full_attention", parameters)
    sliding = parameters.get("sliding_attention", parameters)
    scaling = {}
    for key, value in rope.items():
        match key.split(".", 2)[1:]:
            case ["freq_base"]:
                full["rope_theta"] = decimal(value)
            case ["freq_base_swa"] if sliding is not full:
                sliding["rope_theta"] = decimal(value)
            case ["dimension_count"]:
                _set_rotary_share(config, gguf, full, value)
            case ["scaling", name]:
                scaling[name] = value
            case _:
                raise _refuse(gguf, key, value, f"has no place in {type(config).__name__}")
    _set_scaling(gguf, full, scaling)


def _set_rotary_share(
    config: "PreTrainedConfig", gguf: GgufFile, full: dict[str, Any], count: int
) -> None:
    """How many dimensions of a head turn with the position."""
    head_dim = _head_dim(config)
    if "partial_rotary_factor" in full:
        full["partial_rotary_factor"] = count / head_dim
    elif count != head_dim:
        raise _refuse(
            gguf, "rope.dimension_count", count, f"must be the head's size, {head_dim}, here"
        )


def _set_scaling(gguf: GgufFile, full: dict[str, Any], scaling: dict[str, Any]) -> None:
    scaling.pop("finetuned", None)
    kind = scaling.pop("type", "none")
    told = {name: _scalar(gguf, f"rope.scaling.{name}", value) for name, value in scaling.items()}
    if kind == "linear" and set(told) == {"factor"}:
        full.update(rope_type="linear", **told)
    elif kind == "yarn" and {"factor", "original_context_length"} <= set(told) <= set(YARN):
        full.update({YARN[name]: value for name, value in told.items()}, rope_type="yarn")
    elif kind != "none" or set(told) - {"original_context_length"}:
        # The length alone is that of Phi-3's long variants, whose factors are tensors.
        raise _refuse(gguf, "rope.scaling.type", kind, f"with {told} can't be converted")


def _set_frequencies(config: "PreTrainedConfig", gguf: GgufFile) -> None:
    """Finds the settings of Llama 3.1's scaling that give the factors in the file."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = gguf.tensors[FREQUENCIES].values()
    parameters = config.rope_parameters
    plain = dict(parameters)
    parameters.update(LLAMA3, factor=float(factors.max()))
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    size = 2 * len(frequencies)
    unscaled = parameters["rope_theta"] ** -(np.arange(0, size, 2) / size)
    if (
        plain["rope_type"] != "default"
        or factors.shape != unscaled.shape
        or not np.allclose(unscaled / frequencies.numpy(), factors, rtol=1e-4)
    ):
        raise ModelError(
            f"{gguf.path}: the tensor {FREQUENCIES} holds other factors than those of "
            "Llama 3.1's rotary scaling, and can't be converted"
        )


def _set_family(config: "PreTrainedConfig", told: Mapping[str, Any]) -> None:
    if (num_layers := SCALED_BY_HIDDEN_SIZE.get(config.model_type)) is not None:
        by_hidden_size = config.num_hidden_layers == num_layers
        config.query_pre_attn_scalar = (
            config.hidden_size // config.num_attention_heads if by_hidden_size else config.head_dim
        )
    if config.model_type == "mistral" and "attention.sliding_window" not in told:
        # The default of the class is the first release's.
        config.sliding_window = None
