"""A decoder layer of the common shape, as calls of our kernels in place of transformers' code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workers.attention.native import Step
from workers.layers.lean_room import LeanRoom
from workers.layers.packed import SummedProduct
from workers.layers.paged_attention import AttentionCall, PagedAttention, PlannedCall
from workers.native.calls import Call, Calls
from workers.native.decoder import LANES, DecoderKernels, Gate, Norm
from workers.native.linear import JointProduct

HEADS = ("query", "key", "value")
Turns = tuple[torch.Tensor, torch.Tensor]  # cosine and sine [1, T, rotary]


class UnsuitedLayerError(Exception):
    """What a layer gets or computes on the way isn't what our kernels take."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(function(gate(x)) * up(x))."""

    gate_and_up: JointProduct
    function: Gate
    down: SummedProduct


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """What a layer is made of. Modules are called; the rest is known to the kernels."""

    input_norm: Norm
    projections: JointProduct  # queries, keys, values
    head_norms: tuple[Norm | None, Norm | None]  # of queries and keys
    output: SummedProduct | nn.Module
    attended_norm: Norm | None  # of what attention adds
    mlp_norm: Norm
    mlp: GatedMLP | nn.Module
    added_norm: Norm | None  # of what the MLP adds

    @property
    def hidden_size(self) -> int:
        return self.projections.inputs


class Program:
    """Calls in a row, and what Python does between some of them."""

    def __init__(self) -> None:
        self._parts: list[tuple[Calls, Callable[[int], None]]] = []
        self._calls: list[Call] = []

    def add(self, *calls: Call) -> None:
        self._calls += calls

    def then(self, function: Callable[[int], None]) -> None:
        """Gets the number of tokens."""
        self._parts.append((Calls(self._calls), function))
        self._calls = []

    def parts(self) -> list[tuple[Calls, Callable[[int], None]]]:
        """What was added after the last function too."""
        self.then(_forget)
        return self._parts


class LeanLayer:
    """Takes `hidden` [T, hidden] from the room and leaves it there."""

    def __init__(
        self,
        parts: LayerParts,
        call: AttentionCall,
        kernels: DecoderKernels,
        attention: PagedAttention,
        room: LeanRoom,
    ) -> None:
        self.parts = parts
        self.call = call
        self.room = room
        self._kernels = kernels
        self._attention = attention
        names = ("hidden", "normed", "middle", "added")
        room.reserve(dict.fromkeys(names, parts.hidden_size))
        room.reserve(dict(zip(HEADS, parts.projections.outputs, strict=True)))
        room.reserve({"attended": call.shape.num_heads * call.shape.v_dim})
        products = [parts.projections]
        if isinstance(parts.output, SummedProduct):
            products.append(parts.output.product)
        if isinstance(parts.mlp, GatedMLP):
            room.reserve(dict.fromkeys(("gate", "up", "gated"), parts.mlp.gate_and_up.outputs[0]))
            products += [parts.mlp.gate_and_up, parts.mlp.down.product]
        size = parts.input_norm.weight.dtype.itemsize
        for product in products:
            room.reserve({"stage": -(-product.row_bytes // size)})

    def check(self, hidden: torch.Tensor, turns: Turns) -> None:
        """Raises UnsuitedLayerError: the kernels would read beyond them, or other numbers.

        They take hidden states [1, T, hidden], and turns for halves that vectors divide.
        """
        cosine, sine = turns
        weight = self.parts.input_norm.weight
        is_batch = hidden.dim() == 3 and len(hidden) == 1 and hidden.shape[1] > 0
        if not is_batch or hidden.shape[2:] != weight.shape or hidden.dtype != weight.dtype:
            raise UnsuitedLayerError(f"hidden states {list(hidden.shape)} {hidden.dtype}")
        rotary = cosine.shape[-1]
        if not (
            cosine.shape == sine.shape == (1, hidden.shape[1], rotary)
            and cosine.dtype == sine.dtype == weight.dtype
            and rotary <= self.call.shape.k_dim
            and rotary % (2 * LANES) == 0
        ):
            raise UnsuitedLayerError(f"cosine {list(cosine.shape)} {cosine.dtype}")

    def place(self, program: Program, planned: PlannedCall | None) -> "PlacedLayer":
        """Writes its calls down, for the room and the cache as they are now."""
        room, parts, shape, kernels = self.room, self.parts, self.call.shape, self._kernels
        at, width = room.address, parts.hidden_size
        heads = [(at("query"), shape.num_heads), (at("key"), shape.num_kv_heads)]
        turn = kernels.norm_and_rotate(heads, parts.head_norms, dim=shape.k_dim)
        program.add(
            kernels.norm(at("normed"), at("hidden"), parts.input_norm, width=width),
            self._product(parts.projections, "normed", *HEADS),
            turn,
        )
        placed = PlacedLayer(self, turn.arguments)
        if planned is None:
            program.then(placed.attend)
        else:
            attend = planned.backend.call(shape, planned.cache, self._heads(1), at("attended"))
            placed.attention = attend.arguments
            program.add(attend)
        if isinstance(parts.output, SummedProduct):
            self._add_summed(program, parts.output, "attended")
        else:
            program.then(self._run_output)
        program.add(
            kernels.norm(
                at("middle"), at("hidden"), parts.attended_norm, width=width, added=at("added")
            ),
            kernels.norm(at("normed"), at("middle"), parts.mlp_norm, width=width),
        )
        if isinstance(parts.mlp, GatedMLP):
            program.add(*self._gated(parts.mlp))
            self._add_summed(program, parts.mlp.down, "gated")
        else:
            program.then(self._run_mlp)
        program.add(
            kernels.norm(
                at("hidden"), at("middle"), parts.added_norm, width=width, added=at("added")
            )
        )
        return placed

    def attend(self, num_tokens: int, mask: object) -> None:
        """By a backend that is no kernel of ours, or by a dry run, whose `mask` it is."""
        query, key, value = self._heads(num_tokens)
        attended = self._attention.attend(self.call, query, key, value, mask)
        self.room.rows("attended", *attended.shape).copy_(attended)

    def _heads(self, num_tokens: int) -> list[torch.Tensor]:
        """Queries, keys and values [T, heads, dim] in the room."""
        shape, rows = self.call.shape, self.room.rows
        return [
            rows("query", num_tokens, shape.num_heads, shape.k_dim),
            rows("key", num_tokens, shape.num_kv_heads, shape.k_dim),
            rows("value", num_tokens, shape.num_kv_heads, shape.v_dim),
        ]

    def _product(self, product: JointProduct, rows: str, *outputs: str) -> Call:
        at = self.room.address
        return product.call(at(rows), [at(each) for each in outputs], at("stage"))

    def _gated(self, mlp: GatedMLP) -> list[Call]:
        at, width = self.room.address, mlp.gate_and_up.outputs[0]
        return [
            self._product(mlp.gate_and_up, "normed", "gate", "up"),
            self._kernels.gate(mlp.function, at("gated"), at("gate"), at("up"), width=width),
        ]

    def _add_summed(self, program: Program, summed: SummedProduct, rows: str) -> None:
        """A call that makes `added`, and where there are several ranks their sum."""
        program.add(self._product(summed.product, rows, "added"))
        parallel = summed.parallel
        if parallel is not None:
            program.then(lambda num_tokens: _forget(parallel.all_reduce(self._added(num_tokens))))

    def _added(self, num_tokens: int) -> torch.Tensor:
        return self.room.rows("added", num_tokens, 1, self.parts.hidden_size)

    def _run_output(self, num_tokens: int) -> None:
        shape = self.call.shape
        self._run(
            self.parts.output,
            self.room.rows("attended", num_tokens, shape.num_heads, shape.v_dim),
        )

    def _run_mlp(self, num_tokens: int) -> None:
        self._run(self.parts.mlp, self.room.rows("normed", num_tokens, 1, self.parts.hidden_size))

    def _run(self, module: object, rows: torch.Tensor) -> None:
        """What the module returns is what is added.

        It gets a copy, which it may keep, or change.
        """
        assert isinstance(module, nn.Module)
        num_tokens = len(rows)
        match module(rows.clone().view(1, num_tokens, -1)):
            case torch.Tensor() as added:
                room = self._added(num_tokens).view(1, num_tokens, -1)
                if added.shape == room.shape and added.dtype == room.dtype:
                    room.copy_(added)
                    return
        raise UnsuitedLayerError("what is added has another shape or dtype")


@dataclass(slots=True)
class PlacedLayer:
    """A layer's calls in one program."""

    layer: LeanLayer
    turn: Any  # arguments, as of what attends
    attention: Any = None
    step: Step | None = None
    mask: object = None

    def tell(self, turns: Turns, planned: PlannedCall | None, mask: object) -> None:
        """What the next run takes; it must be dense, and live until then."""
        cosine, sine = turns
        turn = self.turn
        turn.cosine, turn.sine, turn.rotary = cosine.data_ptr(), sine.data_ptr(), cosine.shape[-1]
        self.mask = mask
        if planned is not None:
            self.step = planned.backend.step(planned.call.shape, planned.metadata)
            self.attention.step = self.step.address

    def attend(self, num_tokens: int) -> None:
        """Where no kernel does."""
        self.layer.attend(num_tokens, self.mask)


def _forget(_: object) -> None:
    """Follows the last calls."""
