"""The sizes of a model that decide what a step costs.

Read from a `config.json` of transformers as plain JSON, or taken from the presets. Only families
whose layers are attention + gated MLP are known; others are refused, not guessed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.config import require
from runtime.errors import ConfigError
from runtime.scheduling.cache_layout import LayerCacheSpec

FAMILIES = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
)
# Their layers have a norm after attention and MLP too.
FOUR_NORM_FAMILIES = ("gemma2", "gemma3", "gemma3_text")
# Layers of which one sees everything, where the configuration doesn't say.
WINDOW_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}
TIED_FAMILIES = ("gemma", "gemma2", "gemma3", "gemma3_text")  # where the key is left out
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder of `len(windows)` layers, each attention + gated MLP."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int, ...]  # of each layer: tokens a query sees, itself included; 0: all
    num_norms: int = 2  # of hidden_size, in a layer
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool  # lm_head is the embedding
    element_bytes: int = 2  # of weights and cache
    max_model_len: int

    def __post_init__(self) -> None:
        names = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*names, "vocab_size", "max_model_len"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value} of {self.name} must be at least 1")
        require(bool(self.windows), f"{self.name} has no layers")

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def linear_params(self) -> int:
        """Weights that every token is multiplied by: those of the layers."""
        queries = self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp)

    @property
    def head_params(self) -> int:
        """Weights that every sampled row is multiplied by."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        biases = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.qkv_bias
        norms = self.num_norms * self.hidden_size + 2 * self.head_dim * self.qk_norm
        embeddings = self.head_params * (1 if self.tied else 2)
        small = self.num_layers * (norms + biases) + self.hidden_size
        return self.linear_params + embeddings + small

    @property
    def weight_bytes(self) -> int:
        """What the weights take in memory, all ranks together."""
        return self.num_params * self.element_bytes

    @property
    def step_weight_bytes(self) -> int:
        """What a step reads of them: of an untied embedding it reads a row for each token."""
        unread = 0 if self.tied else self.head_params
        return self.weight_bytes - unread * self.element_bytes

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads are replicated where there are fewer of them than ranks."""
        return max(1, self.num_kv_heads // tp)

    def cache_specs(self, tp: int) -> list[LayerCacheSpec]:
        return [
            LayerCacheSpec(
                window=window,
                num_kv_heads=self.kv_heads_per_rank(tp),
                k_dim=self.head_dim,
                v_dim=self.head_dim,
                element_bytes=self.element_bytes,
            )
            for window in self.windows
        ]


def read_model_config(path: Path) -> ModelShape:
    """The shape that a `config.json` describes.

    Raises ConfigError: it can't be read, lacks a key, or is of a family that isn't known.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model_config={path}: {error}") from error
    require(isinstance(values, dict), f"model_config={path} must hold a JSON object")
    # Models that also see images keep the decoder's keys one level down.
    family = values.get("model_type")
    values = values.get("text_config", values)
    try:
        return shape_from(path.parent.name or str(path), family, values)
    except KeyError as error:
        raise ConfigError(f"model_config={path}: key {error} is missing") from error


def shape_from(name: str, family: str | None, config: Mapping[str, Any]) -> ModelShape:
    """Raises KeyError: a key is missing. Raises ConfigError: the family isn't known."""
    if family not in FAMILIES:
        raise ConfigError(
            f"model_type={family!r} of {name} isn't one of those whose cost is known: "
            f"{', '.join(FAMILIES)}"
        )
    heads = config["num_attention_heads"]
    kind = config.get("dtype", config.get("torch_dtype", "bfloat16"))
    require(kind in ELEMENT_BYTES, f"dtype={kind!r} of {name} must be one of {[*ELEMENT_BYTES]}")
    return ModelShape(
        name=name,
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        windows=_windows(family, config),
        num_norms=4 if family in FOUR_NORM_FAMILIES else 2,
        qk_norm=family in ("qwen3", "gemma3", "gemma3_text"),
        qkv_bias=family == "qwen2",
        tied=config.get("tie_word_embeddings", family in TIED_FAMILIES),
        element_bytes=ELEMENT_BYTES[kind],
        max_model_len=config["max_position_embeddings"],
    )


def _windows(family: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    num_layers: int = config["num_hidden_layers"]
    window: int = config.get("sliding_window") or 0
    if not window or config.get("use_sliding_window") is False:
        return (0,) * num_layers
    if kinds := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    pattern = pattern or WINDOW_PATTERNS.get(family)
    if pattern:  # the last layer of each so many sees everything
        return tuple(0 if (layer + 1) % pattern == 0 else window for layer in range(num_layers))
    first = config.get("max_window_layers", 0)  # those before it see everything
    return tuple(0 if layer < first else window for layer in range(num_layers))


def _gemma_windows(num_layers: int, *, window: int) -> tuple[int, ...]:
    return tuple(0 if layer % 6 == 5 else window for layer in range(num_layers))


# Sizes as in the models' public configurations.
PRESETS = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="llama-3.2-1b",
            hidden_size=2048,
            intermediate_size=8192,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            vocab_size=128256,
            windows=(0,) * 16,
            tied=True,
            max_model_len=131072,
        ),
        ModelShape(
            name="llama-3.1-8b",
            hidden_size=4096,
            intermediate_size=14336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128256,
            windows=(0,) * 32,
            tied=False,
            max_model_len=131072,
        ),
        ModelShape(
            name="llama-3.1-70b",
            hidden_size=8192,
            intermediate_size=28672,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128256,
            windows=(0,) * 80,
            tied=False,
            max_model_len=131072,
        ),
        ModelShape(
            name="qwen3-0.6b",
            hidden_size=1024,
            intermediate_size=3072,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=151936,
            windows=(0,) * 28,
            qk_norm=True,
            tied=True,
            max_model_len=40960,
        ),
        ModelShape(
            name="qwen3-8b",
            hidden_size=4096,
            intermediate_size=12288,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=151936,
            windows=(0,) * 36,
            qk_norm=True,
            tied=False,
            max_model_len=40960,
        ),
        ModelShape(
            name="qwen3-32b",
            hidden_size=5120,
            intermediate_size=25600,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=151936,
            windows=(0,) * 64,
            qk_norm=True,
            tied=False,
            max_model_len=40960,
        ),
        ModelShape(
            name="gemma-3-270m",
            hidden_size=640,
            intermediate_size=2048,
            num_heads=4,
            num_kv_heads=1,
            head_dim=256,
            vocab_size=262144,
            windows=_gemma_windows(18, window=512),
            num_norms=4,
            qk_norm=True,
            tied=True,
            max_model_len=32768,
        ),
        ModelShape(
            name="gemma-3-27b",
            hidden_size=5376,
            intermediate_size=21504,
            num_heads=32,
            num_kv_heads=16,
            head_dim=128,
            vocab_size=262208,
            windows=_gemma_windows(62, window=1024),
            num_norms=4,
            qk_norm=True,
            tied=True,
            max_model_len=131072,
        ),
    )
}
