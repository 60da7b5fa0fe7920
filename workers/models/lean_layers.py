"""Finds decoder layers of the common shape, and shows that our kernels compute the same.

On a CPU a decode step of few rows costs as much in calls as in reading weights. What is common:
norms by root mean square, separate projections of queries, keys and values, rotary embedding of
halves, a gated MLP or any other. Whether a layer has the shape is read off its modules; that
nothing else is in it is shown by running both.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from workers.layers.lean import GatedMLP, LayerParts, LeanLayer, UnsuitedLayerError
from workers.layers.lean_room import LeanRoom
from workers.layers.lean_run import LeanForward
from workers.layers.packed import SummedProduct, join_layers, summed_product
from workers.layers.paged_attention import AttentionCall, HeadShard, PagedAttention, ProbePass
from workers.models.probe import Forward
from workers.native.calls import Calls
from workers.native.decoder import LANES, DecoderKernels, Gate, Norm, decoder_kernels
from workers.native.linear import JointProduct
from workers.parallel import TensorParallel

logger = logging.getLogger(__name__)

# Of the size of what is compared: a last bit or two, and what one layer makes of them.
BOUNDS = {torch.float32: 5e-5, torch.bfloat16: 0.01}
NUM_TOKENS = 6
LARGE = 1000.0  # of a row's numbers
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
    parallel: TensorParallel,
) -> int:
    """Replaces the forwards of layers that have the shape and compute the same.

    In inference mode. Returns how many were replaced.
    """
    kernels = decoder_kernels(model.dtype)
    probe, room = ProbePass(max_positions, heads), LeanRoom(model.dtype)
    compared = {}
    for module in model.modules():
        recognised = kernels and _recognise(module, model.dtype, kernels, calls)
        if kernels and recognised:
            lean = LeanForward(LeanLayer(*recognised, kernels, attention, room), attention)
            compared[module] = _Compared(module.forward, lean, probe, BOUNDS[model.dtype])
    if not parallel.all_agree(bool(compared)):  # one may have no compiler
        return 0
    ids, positions = draw_tokens(max_positions, vocab_size)
    before = {module: module.__dict__.get("forward") for module in compared}
    for module, both in compared.items():
        module.__dict__["forward"] = both
    forward(ids, positions, torch.arange(NUM_TOKENS), probe)
    same = 0
    for module, both in compared.items():
        if both.is_same:
            module.__dict__["forward"] = both.lean
            same += 1
        else:
            _restore(module, before[module])
    logger.info("%d of %d decoder layers are computed by kernels", same, len(compared))
    return same


def draw_tokens(max_positions: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions [NUM_TOKENS], spread over all there are."""
    places = torch.arange(1, NUM_TOKENS + 1)
    return places * vocab_size // (NUM_TOKENS + 1), places * max_positions // (NUM_TOKENS + 1)


class _Compared:
    """Stands for a layer's forward in a dry run: runs it and ours on the same rows.

    One layer at a time: what rounding makes of a difference in many would hide others.
    """

    def __init__(
        self, plain: Callable[..., object], lean: LeanForward, probe: ProbePass, bound: float
    ) -> None:
        self.lean = lean
        self.is_same = False  # it may never be called
        self._plain = plain
        self._probe = probe
        self._bound = bound

    def __call__(self, hidden_states: torch.Tensor, *others: object, **named: object) -> object:
        given = hidden_states.clone()
        start = len(self._probe.inputs)
        expected = self._plain(hidden_states, *others, **named)
        attended = len(self._probe.inputs)
        try:
            found = self.lean(given, *others, **named)
        except UnsuitedLayerError as error:
            logger.debug("a decoder layer is computed by transformers: %s", error)
            return expected
        self.is_same = (
            isinstance(expected, torch.Tensor)
            and self._adds_the_same(expected, found, given)
            and all(
                map(
                    self._alike, _parts(self._probe, start, attended), _parts(self._probe, attended)
                )
            )
        )
        return expected

    def _adds_the_same(
        self, expected: torch.Tensor, found: torch.Tensor, given: torch.Tensor
    ) -> bool:
        """What a layer adds may be small beside what it gets, of which the last bits differ."""
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return False
        expected, found, given = expected.double(), found.double(), given.double()
        rounding = torch.finfo(self.lean.layer.parts.input_norm.weight.dtype).eps * expected.norm()
        bound = self._bound * (expected - given).norm() + rounding
        return bool((expected - found).norm() <= bound)

    def _alike(self, expected: torch.Tensor, found: torch.Tensor) -> bool:
        return expected.shape == found.shape and _differ_less(expected, found, self._bound)


def _parts(probe: ProbePass, start: int, stop: int | None = None) -> list[torch.Tensor]:
    """Queries, keys and values of some calls."""
    return list(chain(*((each.query, each.key, each.value) for each in probe.inputs[start:stop])))


def _differ_less(expected: torch.Tensor, computed: torch.Tensor, bound: float) -> bool:
    expected, computed = expected.double(), computed.double()
    return bool((expected - computed).norm() <= bound * expected.norm())


def _recognise(
    layer: nn.Module,
    dtype: torch.dtype,
    kernels: DecoderKernels,
    calls: Sequence[AttentionCall],
) -> tuple[LayerParts, AttentionCall] | None:
    """None: it has another shape, sizes that vectors don't divide, or weights not packed."""
    children = dict(layer.named_children())
    if set(children) not in (CHILDREN, CHILDREN | AROUND_MLP) or not _takes_turns(layer):
        return None
    attend = children["self_attn"]
    own = [call for call in calls if call.module is attend]
    parts = dict(attend.named_children())
    names = set(parts) - {"rotary_emb"}
    if names not in (PROJECTIONS, PROJECTIONS | HEAD_NORMS) or len(own) != 1:
        return None
    (call,) = own
    projections = join_layers([parts[name] for name in ("q_proj", "k_proj", "v_proj")])
    found = {name: find_norm(children[name], dtype) for name in children}
    norms = {name: norm for name, norm in found.items() if norm is not None}
    of_heads = [find_norm(parts[name], dtype) for name in sorted(names & HEAD_NORMS, reverse=True)]
    shape = call.shape
    outputs = [shape.num_heads * shape.k_dim, shape.num_kv_heads * shape.k_dim]
    outputs.append(shape.num_kv_heads * shape.v_dim)
    has_more = set(children) >= AROUND_MLP
    if (
        projections is None
        or len(norms) != len(children) - 2
        or projections.dtype != dtype
        or projections.outputs != outputs
        or any(norm.weight.shape != (projections.inputs,) for norm in norms.values())
        or any(norm is None or norm.weight.shape != (shape.k_dim,) for norm in of_heads)
        or len({(norm.epsilon, norm.plus_one) for norm in of_heads if norm is not None}) > 1
        or call.heads is not None
        or shape.has_sinks
        or shape.k_dim % LANES
    ):
        return None
    after = norms["post_attention_layernorm"]
    hidden = projections.inputs
    output = _summed(parts["o_proj"], shape.num_heads * shape.v_dim, hidden)
    made = LayerParts(
        input_norm=norms["input_layernorm"],
        projections=projections,
        head_norms=(of_heads[0], of_heads[1]) if of_heads else (None, None),
        output=output or parts["o_proj"],
        attended_norm=after if has_more else None,
        mlp_norm=norms["pre_feedforward_layernorm"] if has_more else after,
        mlp=_gated(children["mlp"], hidden, kernels) or children["mlp"],
        added_norm=norms["post_feedforward_layernorm"] if has_more else None,
    )
    return made, call


def _takes_turns(layer: nn.Module) -> bool:
    """Whether it gets cosine and sine from its model."""
    names = list(inspect.signature(layer.forward).parameters)
    return names[:1] == ["hidden_states"] and "position_embeddings" in names


def _summed(layer: nn.Module, inputs: int, outputs: int) -> SummedProduct | None:
    summed = summed_product(layer)
    if summed is None or (summed.product.inputs, summed.product.outputs) != (inputs, [outputs]):
        return None
    return summed


def _gated(mlp: nn.Module, hidden: int, kernels: DecoderKernels) -> GatedMLP | None:
    parts = dict(mlp.named_children())
    if set(parts) != GATED:
        return None
    gate_and_up = join_layers([parts["gate_proj"], parts["up_proj"]])
    function = _gate(parts["act_fn"])
    if gate_and_up is None or function is None:
        return None
    width, other = gate_and_up.outputs
    if width != other or width % LANES or gate_and_up.inputs != hidden:
        return None
    down = _summed(parts["down_proj"], width, hidden)
    if down is None or not _gates_alike(mlp, parts["down_proj"], gate_and_up, function, kernels):
        return None
    return GatedMLP(gate_and_up, function, down)


def _gates_alike(
    mlp: nn.Module,
    down: nn.Module,
    gate_and_up: JointProduct,
    function: Gate,
    kernels: DecoderKernels,
) -> bool:
    """Also where gates are so large that some models cut them off, which few tokens make."""
    inputs, dtype = gate_and_up.inputs, gate_and_up.dtype
    rows = torch.linspace(-LARGE, LARGE, 2 * inputs).sin().mul(LARGE).to(dtype).view(1, 2, inputs)
    given: list[torch.Tensor] = []

    def keep(gated: torch.Tensor) -> torch.Tensor:
        """In place of a product, whose sum over ranks nobody waits for here."""
        given.append(gated)
        return rows

    before = down.__dict__.get("forward")
    down.__dict__["forward"] = keep
    try:
        mlp(rows)
    finally:
        _restore(down, before)
    gate, up = gate_and_up(rows)
    found = torch.empty_like(up)
    addresses = found.data_ptr(), gate.data_ptr(), up.data_ptr()
    Calls([kernels.gate(function, *addresses, width=up.shape[-1])])(2)
    if len(given) != 1 or given[0].shape != found.shape:
        return False
    return _differ_less(given[0], found, BOUNDS[dtype])


def _restore(module: nn.Module, forward: object) -> None:
    """The class's own forward, where there was no other."""
    if forward is None:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = forward


def _gate(function: nn.Module) -> Gate | None:
    points = torch.linspace(-9, 9, 64)
    found = function(points)
    if torch.allclose(found, functional.silu(points)):
        return "silu"
    if torch.allclose(found, functional.gelu(points, approximate="tanh")):
        return "gelu"
    return None


def find_norm(module: nn.Module, dtype: torch.dtype) -> Norm | None:
    """By what it computes, of rows of any size and of those in which epsilon counts."""
    parameters = dict(module.named_parameters())
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(parameters) != {"weight"} or not isinstance(epsilon, float):
        return None
    weight = parameters["weight"]
    if weight.dim() != 1 or len(weight) % LANES or weight.dtype != dtype:
        return None
    row = torch.linspace(-2, 3, len(weight))
    rows = torch.stack((row, row * epsilon**0.5)).to(dtype)
    wide = rows.float() * torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + epsilon)
    found = module(rows.unsqueeze(0))[0].float()
    for plus_one in (False, True):
        expected = wide * (weight.float() + plus_one)
        if all(map(partial(_differ_less, bound=BOUNDS[dtype]), expected, found)):
            return Norm(weight.detach(), epsilon, plus_one)
    return None
