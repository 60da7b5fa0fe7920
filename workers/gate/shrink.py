"""A small copy of a model's configuration: the same architecture in a few thousand numbers.

What makes a model's kind stays: layer types, expert routing, ratios of heads, kinds of rotary
positions. What makes it large shrinks, found by the names that configurations give it.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from workers.gate.errors import NoReference
from workers.gate.layer_kinds import TOKEN_IDS, are_indices, is_count, num_layers
from workers.models.config import TRANSFORMERS_ERRORS

VOCABULARY = 211  # a prime: no number of ranks divides it
MAX_POSITIONS = 512
ORIGINAL_POSITIONS = 320  # of rotary positions that were stretched
HEAD_DIM = 16

LAYER_COUNTS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers)$")
HEAD_COUNTS = re.compile(
    r"^((num_|swa_num_|encoder_|decoder_|num_(en|de)coder_)?attention_heads(_per_layer)?"
    r"|n_heads?|num_heads)$"
)
WIDTHS = re.compile(
    r"^(hidden_size|n_embd|d_model|emb_dim|embedding_(size|dim)|word_embed_proj_dim"
    r"|(in|out)put_embedding_size|attention_hidden_size|dim_model)$"
)
POSITIONS = re.compile(
    r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions"
    r"|model_max_length)$"
)
# Stand for what isn't text; moved out of the vocabulary, so that no random text has them.
FOREIGN_TOKEN_IDS = re.compile(
    r"^((image|video|audio|vision|speech)_.*token|bo[iav]_token|eo[iav]_token)_(id|index)$"
)
# Where it came from, how it is stored, and what `generate` is to do beside generating.
NOT_OF_THE_KIND = (
    "_name_or_path",
    "output_attentions",
    "output_hidden_states",
    "quantization_config",
    "return_dict",
    "use_mtp",
)
# The size of a head, in the order in which the first that is there counts.
HEAD_SIZES = (
    "qk_nope_head_dim",
    "head_dim",
    "d_head",
    "dim_head",
    "kv_channels",
    "attention_head_dim",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What one configuration shrinks to."""

    layers: int
    of_layers: int  # before
    heads: int
    of_heads: int  # before
    head_scale: float
    tp: int
    is_sparse: bool  # feed-forward layers use only their largest activations

    @property
    def width(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def intermediate(self) -> int:
        """Enough, where few of them are used, for these not to depend on rounding."""
        part = 4 * self.tp  # kernels take 16 bytes at a time of a rank's part
        return math.ceil((1024 if self.is_sparse else 96) / part) * part

    def kv_heads(self, count: int) -> int:
        """As many as query heads where they were, else enough for every rank to have one."""
        if count >= self.of_heads:
            return self.heads
        return math.gcd(min(count, max(2, self.tp)), self.heads)

    def head_dim(self, dim: int) -> int:
        return max(4, round(dim * self.head_scale / 4) * 4)


def _at_most(limit: int) -> Callable[[int, _Sizes], int]:
    return lambda value, _: min(value, limit)


# What numbers shrink to, by name; the first pattern counts, and what has none stays.
RULES: tuple[tuple[re.Pattern[str], Callable[[int, _Sizes], int]], ...] = (
    (FOREIGN_TOKEN_IDS, lambda *_: VOCABULARY + 1),
    (TOKEN_IDS, _at_most(VOCABULARY - 1)),
    (re.compile(r"^original_max_position_embeddings$"), _at_most(ORIGINAL_POSITIONS)),
    (LAYER_COUNTS, lambda _, sizes: sizes.layers),
    (HEAD_COUNTS, lambda _, sizes: sizes.heads),
    (WIDTHS, lambda _, sizes: sizes.width),
    (
        re.compile(r"^((swa_)?num_key_value_heads|num_kv_heads|n_head_kv|num_query_groups)$"),
        lambda value, sizes: sizes.kv_heads(value),
    ),
    (
        re.compile(
            r"^((swa_|global_|v_|qk_|qk_nope_|qk_rope_|attention_)?head_dim|d_head|dim_head"
            r"|kv_channels|rotary_dim|query_pre_attn_scalar)$"
        ),
        lambda value, sizes: sizes.head_dim(value),
    ),
    (
        re.compile(r"^((unpadded|shape|pronunciation)_)?vocab_size(_per_layer_input)?$"),
        lambda *_: VOCABULARY,
    ),
    (
        re.compile(
            r"(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size)$"
            r"|^(d_?ff|dim_ff|n_inner|d_inner|feed_forward_size)$"
        ),
        lambda _, sizes: sizes.intermediate,
    ),
    (re.compile(r"^num_layers_per_stack$"), lambda *_: 1),
    (re.compile(r"^num_kv_shared_layers$"), lambda _, sizes: sizes.layers // 2),
    (re.compile(r"^moe_layer_end_index$"), lambda value, sizes: min(value, sizes.layers - 1)),
    (re.compile(r"^mamba_d_head$"), lambda _, sizes: sizes.width // 4),
    (re.compile(r"^mamba_n_heads$"), _at_most(8)),
    (re.compile(r"^(sliding_window(_size)?|window_size|index_topk)$"), _at_most(8)),
    (
        re.compile(r"^(local_attention|attention_chunk_size|floor_scale|log_scaling_n_floor)$"),
        _at_most(16),
    ),
    (re.compile(r"^(num(_local)?_experts|n_routed_experts|moe_num_experts)$"), _at_most(4)),
    (
        re.compile(
            r"^(zero_expert_num|num_experts_per_tok(en)?|top_k_experts|moe_topk|moe_k|n_group|num_expert_group)$"
        ),
        _at_most(2),
    ),
    (
        re.compile(r"^(topk_group|first_k_dense_replace|num_dense_layers|moe_layer_start_index)$"),
        _at_most(1),
    ),
    (re.compile(r"^(q|kv|o)_lora_rank$"), _at_most(32)),
    (
        re.compile(r"^(hidden_size_per_layer_input|(pronunciation|shape)_embed_dim)$"),
        _at_most(16),
    ),
    (re.compile(r"^laurel_rank$"), _at_most(8)),
)


def shrink(config: PreTrainedConfig, tp: int) -> PreTrainedConfig:
    """A configuration of the same class whose heads still split over `tp` ranks, if they did.

    Raises NoReference: transformers takes no such configuration.
    """
    try:
        small: PreTrainedConfig = type(config).from_dict(_shrink(config.to_dict(), tp))
    except TRANSFORMERS_ERRORS as error:
        raise NoReference(
            f"no small copy can be made of a configuration of model_type {config.model_type!r}: "
            f"{error}"
        ) from error
    return small


def _shrink(values: Mapping[str, Any], tp: int) -> dict[str, Any]:
    sizes = _sizes(values, tp)
    positions = _positions(values)
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            small[name] = _shrink_dict(name, value, sizes)
        elif isinstance(value, list):
            small[name] = _shrink_list(name, value, sizes)
        elif POSITIONS.search(name) and is_count(value):
            small[name] = positions
        else:
            small[name] = _shrink_number(name, value, sizes)
    for name in NOT_OF_THE_KIND:
        small.pop(name, None)
    return small


def _sizes(values: Mapping[str, Any], tp: int) -> _Sizes:
    def find(pattern: re.Pattern[str], default: int) -> int:
        found = (value for name, value in values.items() if pattern.search(name))
        return next(filter(is_count, found), default)

    of_heads = find(HEAD_COUNTS, 1)
    head_dims = (values[name] for name in HEAD_SIZES if is_count(values.get(name)))
    head_dim = next(head_dims, max(1, find(WIDTHS, HEAD_DIM) // of_heads))
    of_layers = find(LAYER_COUNTS, 1)
    return _Sizes(
        layers=num_layers(values, of_layers),
        of_layers=of_layers,
        heads=2 * max(2, tp),
        of_heads=of_heads,
        head_scale=HEAD_DIM / head_dim,
        tp=tp,
        is_sparse=any(values.get("activation_sparsity_pattern") or ()),
    )


def _shrink_number(name: str, value: Any, sizes: _Sizes) -> Any:
    if not is_count(value) and not (TOKEN_IDS.search(name) and isinstance(value, int)):
        return value
    rule = next((rule for pattern, rule in RULES if pattern.search(name)), None)
    return value if rule is None else rule(value, sizes)


def _shrink_list(name: str, value: list[Any], sizes: _Sizes) -> list[Any]:
    if TOKEN_IDS.search(name):
        return sorted({_shrink_number(name, each, sizes) for each in value})
    if value and are_indices(value) and value[-1] < sizes.of_layers:
        return [each for each in value if each < sizes.layers]
    if len(value) == sizes.of_layers:
        return [_shrink_number(name, each, sizes) for each in value[: sizes.layers]]
    return value


def _shrink_dict(name: str, values: Mapping[str, Any], sizes: _Sizes) -> dict[str, Any]:
    if "model_type" in values:  # a part's own configuration
        return _shrink(values, sizes.tp)
    if name in ("rope_parameters", "rope_scaling"):
        return _shrink_rope(values, sizes)
    if name == "per_layer_config":
        return {
            layer: {key: _shrink_number(key, value, sizes) for key, value in own.items()}
            for layer, own in values.items()
            if int(layer) < sizes.layers
        }
    return dict(values)


def _positions(values: Mapping[str, Any]) -> int:
    """Positions of the small copy; stretched by as much as the checkpoint's, if they were."""
    rope: Mapping[str, Any] = values.get("rope_parameters") or {}
    places = (values, rope, *(each for each in rope.values() if isinstance(each, dict)))
    originals = (place.get("original_max_position_embeddings") for place in places)
    original = next(filter(is_count, originals), None)
    reach = values.get("max_position_embeddings")
    if original is None or reach is None:
        return MAX_POSITIONS
    return max(ORIGINAL_POSITIONS, round(ORIGINAL_POSITIONS * int(reach) / int(original)))


def _shrink_rope(rope: Mapping[str, Any], sizes: _Sizes) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _shrink_rope(value, sizes)
        elif name == "original_max_position_embeddings" and is_count(value):
            small[name] = min(value, ORIGINAL_POSITIONS)
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            small[name] = value[: max(2, round(len(value) * sizes.head_scale))]
        elif name == "mrope_section" and isinstance(value, list):
            part, rest = HEAD_DIM // 8, len(value) - 1
            small[name] = [HEAD_DIM // 2 - rest * part, *[part] * rest]
        else:
            small[name] = value
    return small
