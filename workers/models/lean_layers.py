"""Finds decoder layers of the common shape, and shows that our kernels compute the same.

On a CPU a decode step of few rows costs as much in calls as in reading weights. What is common:
norms by root mean square, separate projections of queries, keys and values, rotary embedding of
halves, a gated MLP or any other. Whether a layer has the shape is read off its modules; that
nothing else is in it is shown by running both.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from workers.layers.lean import GatedMLP, LeanLayer
from workers.layers.packed import join_layers
from workers.layers.paged_attention import AttentionCall, HeadShard, PagedAttention, ProbePass
from workers.models.probe import Forward
from workers.native.decoder import LANES, DecoderKernels, Gate, Norm, decoder_kernels

logger = logging.getLogger(__name__)

# Of the size of what is compared: a last bit or two, and what layers make of them.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.03}
NUM_TOKENS = 6
CHILDREN = {"input_layernorm", "post_attention_layernorm", "self_attn", "mlp"}
AROUND_MLP = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def use_lean_layers(
    model: PreTrainedModel,
    forward: Forward,
    attention: PagedAttention,
    calls: Sequence[AttentionCall],
    *,
    heads: Mapping[nn.Module, HeadShard],
    max_positions: int,
    vocab_size: int,
) -> int:
    """Replaces the forwards of layers that have the shape, if all of them compute the same.

    In inference mode. Returns how many were replaced.
    """
    kernels = decoder_kernels(model.dtype)
    if kernels is None:
        return 0
    found = {
        module: lean
        for module in model.modules()
        if (lean := _recognise(module, kernels, attention, calls)) is not None
    }
    if not found:
        return 0
    rows = torch.arange(1, NUM_TOKENS + 1)
    ids, positions = rows * vocab_size // (NUM_TOKENS + 1), rows * max_positions // (NUM_TOKENS + 1)
    passes = []
    for lean_layers in ({}, found):
        for module, lean in lean_layers.items():
            module.__dict__["forward"] = lean
        probe = ProbePass(max_positions, heads)
        passes.append((probe, forward(ids, positions, rows - 1, probe)))
    (plain, plain_logits), (lean_pass, lean_logits) = passes
    expected = [plain_logits, *_inputs(plain)]
    computed = [lean_logits, *_inputs(lean_pass)]
    bound = BOUNDS[model.dtype]
    if not all(map(lambda one, other: _differ_less(one, other, bound), expected, computed)):
        for module in found:
            del module.__dict__["forward"]
        logger.info("decoder layers are computed by transformers: ours would compute others")
        return 0
    logger.info("%d decoder layers are computed by kernels", len(found))
    return len(found)


def _inputs(probe: ProbePass) -> list[torch.Tensor]:
    return list(chain(*((each.query, each.key, each.value) for each in probe.inputs)))


def _differ_less(expected: torch.Tensor, computed: torch.Tensor, bound: float) -> bool:
    expected, computed = expected.double(), computed.double()
    return bool((expected - computed).norm() <= bound * expected.norm())


def _recognise(
    layer: nn.Module,
    kernels: DecoderKernels,
    attention: PagedAttention,
    calls: Sequence[AttentionCall],
) -> LeanLayer | None:
    """None: it has another shape, sizes that vectors don't divide, or weights not packed."""
    children = dict(layer.named_children())
    if set(children) not in (CHILDREN, CHILDREN | AROUND_MLP):
        return None
    attend = children["self_attn"]
    own = [call for call in calls if call.module is attend]
    parts = dict(attend.named_children())
    names = set(parts) - {"rotary_emb"}
    if names not in (PROJECTIONS, PROJECTIONS | HEAD_NORMS) or len(own) != 1:
        return None
    (call,) = own
    projections = join_layers([parts[name] for name in ("q_proj", "k_proj", "v_proj")])
    norms = {name: norm for name in children if (norm := _norm(children[name])) is not None}
    of_heads = [_norm(parts[name]) for name in sorted(names & HEAD_NORMS, reverse=True)]
    has_more = set(children) >= AROUND_MLP
    if (
        projections is None
        or len(norms) != len(children) - 2
        or len({norm.plus_one for norm in norms.values()}) != 1
        or any(norm is None or norm.weight.shape != (call.shape.k_dim,) for norm in of_heads)
        or call.heads is not None
        or call.shape.has_sinks
        or call.shape.k_dim % (2 * LANES)
    ):
        return None
    after = norms["post_attention_layernorm"]
    return LeanLayer(
        kernels=kernels,
        attention=attention,
        call=call,
        input_norm=norms["input_layernorm"],
        projections=projections,
        head_norms=(of_heads[0], of_heads[1]) if of_heads else (None, None),
        output=parts["o_proj"],
        attended_norm=after if has_more else None,
        mlp_norm=norms["pre_feedforward_layernorm"] if has_more else after,
        mlp=_gated(children["mlp"], kernels) or children["mlp"],
        added_norm=norms["post_feedforward_layernorm"] if has_more else None,
    )


def _gated(mlp: nn.Module, kernels: DecoderKernels) -> GatedMLP | None:
    parts = dict(mlp.named_children())
    if set(parts) != GATED:
        return None
    gate_and_up = join_layers([parts["gate_proj"], parts["up_proj"]])
    function = _gate(parts["act_fn"])
    if gate_and_up is None or function is None or gate_and_up.outputs[0] % LANES:
        return None
    return GatedMLP(kernels, gate_and_up, function, parts["down_proj"])


def _gate(function: nn.Module) -> Gate | None:
    points = torch.linspace(-9, 9, 64)
    found = function(points)
    if torch.allclose(found, functional.silu(points)):
        return "silu"
    if torch.allclose(found, functional.gelu(points, approximate="tanh")):
        return "gelu"
    return None


def _norm(module: nn.Module) -> Norm | None:
    """By what it computes."""
    parameters = dict(module.named_parameters())
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(parameters) != {"weight"} or not isinstance(epsilon, float):
        return None
    weight = parameters["weight"]
    if weight.dim() != 1 or len(weight) % LANES:
        return None
    row = torch.linspace(-2, 3, len(weight)).to(weight.dtype)
    wide = row.float() * torch.rsqrt(row.float().pow(2).mean() + epsilon)
    found = module(row).float()
    bound = BOUNDS.get(weight.dtype, 0.0)
    for plus_one in (False, True):
        if _differ_less(wide * (weight.float() + plus_one), found, bound):
            return Norm(weight.detach(), epsilon, plus_one)
    return None
