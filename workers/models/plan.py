"""Which part of a model is cut how: the plan in its class and configuration, and what we add.

Styles are named as transformers names them. A style stands for a module, or for a parameter of a
module that isn't a linear layer.
"""

import re
from collections.abc import Mapping

from transformers import PreTrainedModel

from workers.layers.linear_methods import LinearMethods

# Styles that change nothing in inference.
WHOLE = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicate"})
# Fused projections of queries, keys and values, one after the other.
PACKED_QKV = "packed_qkv"
# Of parameters: kept on one rank, zero on the others.
FIRST_RANK = "first_rank"
# Of norms: a row for each head of the attention module around them.
HEAD_ROWS = "head_rows"

# Where plans gather what they have cut, or leave it whole, these do better. They come before the
# plan.
BETTER = (
    (r"\.mlp\.gate_up_proj$", "packed_colwise"),
    (r"\.mlp\.down_proj$", "rowwise"),
    (r"\.self_attn\.qkv_proj$", PACKED_QKV),
    (r"\.(self_attn|attention)\.(o_proj|out_proj|dense)$", "rowwise"),
)
# Where a plan says nothing.
OTHERWISE = (
    # Attention: separate projections, multi-head latent attention, fused ones, BERT's names.
    (r"\.(self_attn|attn|attention|self)\.(q_proj|k_proj|v_proj|query|key|value)$", "colwise"),
    (r"\.self_attn\.(q_b_proj|kv_b_proj)$", "colwise"),
    (r"\.(self_attn|attention)\.query_key_value$", "colwise"),
    (r"\.attn\.c_attn$", PACKED_QKV),
    (r"\.(attn|attention)\.(o_proj|out_proj|dense|c_proj)$", "rowwise"),
    (r"\.attention\.output\.dense$", "rowwise"),
    (r"\.self_attn\.gate_proj$", "colwise"),
    (r"\.attn\.Wo$", "rowwise"),
    (r"\.self_attn\.(sinks|attention_sink_bias)$", "colwise"),
    # Feed-forward layers.
    (r"\.mlp\.(gate_proj|up_proj|fc1|fc_in|c_fc|dense_h_to_4h)$", "colwise"),
    (r"\.mlp\.(fc2|fc_out|c_proj|dense_4h_to_h)$", "rowwise"),
    (r"\.mlp\.Wi$", "packed_colwise"),
    (r"\.mlp\.Wo$", "rowwise"),
    (r"\.feed_forward\.(w1|w3)$", "colwise"),
    (r"\.feed_forward\.w2$", "rowwise"),
    (r"layers\.\*\.fc1$", "colwise"),
    (r"layers\.\*\.fc2$", "rowwise"),
    (r"\.shared_mlp\.input_linear$", "packed_colwise"),
    (r"\.shared_mlp\.output_linear$", "rowwise"),
    (r"\.intermediate\.dense$", "colwise"),
    (r"layer\.\*\.output\.dense$", "rowwise"),
)
# By class.
OVERRIDES: Mapping[str, tuple[tuple[str, str], ...]] = {
    # Four blocks of queries, values and keys, whatever the number of heads.
    "CodeGenForCausalLM": (
        (r"\.attn\.qkv_proj$", "colwise_gather_output"),
        (r"\.attn\.out_proj$", "rowwise"),
    ),
    # Pairs heads that are half of all heads apart.
    "DiffLlamaForCausalLM": ((r"\.self_attn\.", "replicate"),),
    # Takes mean and deviation over all of a gate's outputs.
    "Gemma3nForCausalLM": (
        (r"\.mlp\.(gate_proj|up_proj)$", "colwise_gather_output"),
        (r"\.mlp\.down_proj$", "rowwise_split_input"),
    ),
    # Gate and up interleaved in the last dimension, weights [in, out].
    "GptOssForCausalLM": (
        (r"\.mlp\.experts$", "moe_tp_experts"),
        (r"\.mlp\.experts\.gate_up_proj(_bias)?$", "rowwise"),
        (r"\.mlp\.experts\.down_proj$", "colwise"),
        (r"\.mlp\.experts\.down_proj_bias$", FIRST_RANK),
    ),
}


def styles_of(model: PreTrainedModel) -> dict[str, str]:
    """The style of every module and parameter that is cut or wrapped, by name."""
    linear = {name for name, module in model.named_modules() if LinearMethods().of(module)}
    overrides = OVERRIDES.get(type(model).__name__, ())
    found = {
        name: HEAD_ROWS
        for name, parameter in model.named_parameters()
        if re.search(r"\.self_attn\.(q|k)_norm\.weight$", name) and parameter.dim() == 2
    }
    for name in (*dict(model.named_modules()), *dict(model.named_parameters())):
        generic = generic_name(name)
        style = _match(overrides, generic)
        if style is None and name in linear:
            style = _match(BETTER, generic)
        style = style or model.tp_plan.get(generic) or _match(OTHERWISE, generic)
        if style is not None and style not in WHOLE:
            found[name] = style
    return found


def generic_name(name: str) -> str:
    """A module's name as plans write it, layer numbers as stars."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _match(table: tuple[tuple[str, str], ...], name: str) -> str | None:
    return next((style for pattern, style in table if re.search(pattern, name)), None)
