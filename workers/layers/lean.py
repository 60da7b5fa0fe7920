"""A decoder layer of the common shape, computed by our kernels in place of transformers' code.

Between two things that Python does (attention, sums over ranks, a module that has no kernel) all of
it is one call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workers.layers.lean_room import LeanRoom
from workers.layers.packed import SummedProduct
from workers.layers.paged_attention import AttentionCall, PagedAttention, PlannedCall
from workers.native.calls import Call, Calls
from workers.native.decoder import LANES, DecoderKernels, Gate, Norm
from workers.native.linear import JointProduct

HEADS = ("query", "key", "value")


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


class LeanLayer:
    """Stands for the forward of a decoder layer."""

    def __init__(
        self,
        parts: LayerParts,
        call: AttentionCall,
        kernels: DecoderKernels,
        attention: PagedAttention,
        room: LeanRoom,
    ) -> None:
        self.parts = parts
        self._kernels = kernels
        self._attention = attention
        self._call = call
        self._room = room
        # For which there are calls: of the room, and the cache, None in a dry run.
        self._version = 0
        self._cache: object = None
        self._mask: object = None  # of a call that goes to `attend`
        self._kept: torch.Tensor | None = None  # what a module returned, while kernels read it
        names = ("normed", "middle", "added")
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

    def __call__(
        self,
        hidden_states: torch.Tensor,
        attention_mask: object = None,
        position_embeddings: object = None,
        *_: object,
        **__: object,
    ) -> torch.Tensor:
        """[1, T, hidden] -> [1, T, hidden].

        Raises UnsuitedLayerError: the kernels would read beyond what they are given, or other
        numbers than there are.
        """
        self._check(hidden_states)
        hidden = hidden_states.contiguous()
        num_tokens = hidden.shape[1]
        cosine, sine = self._turns(position_embeddings, num_tokens)
        self._room.prepare(num_tokens)
        planned = self._attention.take(self._call, hidden.dtype)
        cache = None if planned is None else planned.cache
        if self._version != self._room.version or self._cache is not cache:
            self._place(planned)
        if planned is None:
            self._mask = attention_mask
        else:
            self._attend.step = planned.backend.step(planned.call.shape, planned.metadata)
        self._norm.rows = self._first_add.rows = hidden.data_ptr()
        self._turn.cosine, self._turn.sine = cosine.data_ptr(), sine.data_ptr()
        self._turn.rotary = cosine.shape[-1]
        made = torch.empty_like(hidden)
        self._last_add.output = made.data_ptr()
        for calls, then in self._program:
            calls(num_tokens)
            then(num_tokens)
        return made

    def _check(self, hidden: torch.Tensor) -> None:
        weight = self.parts.input_norm.weight
        is_batch = hidden.dim() == 3 and len(hidden) == 1 and hidden.shape[1] > 0
        if not is_batch or hidden.shape[2:] != weight.shape or hidden.dtype != weight.dtype:
            raise UnsuitedLayerError(f"hidden states {list(hidden.shape)} {hidden.dtype}")

    def _turns(self, embeddings: object, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [1, T, rotary] for halves that vectors divide."""
        match embeddings:
            case (torch.Tensor() as cosine, torch.Tensor() as sine):
                rotary = cosine.shape[-1]
                is_suited = (
                    cosine.shape == sine.shape == (1, num_tokens, rotary)
                    and cosine.dtype == sine.dtype == self.parts.input_norm.weight.dtype
                    and rotary <= self._call.shape.k_dim
                    and rotary % (2 * LANES) == 0
                )
                if is_suited:
                    return cosine.contiguous(), sine.contiguous()
        raise UnsuitedLayerError(
            "no cosine and sine of all tokens, in halves, of the model's dtype"
        )

    def _place(self, planned: PlannedCall | None) -> None:
        """Writes down all calls, for the room and the cache as they are now."""
        room, parts, shape, kernels = self._room, self.parts, self._call.shape, self._kernels
        at, width = room.address, parts.hidden_size
        program = _Program()
        norm = kernels.norm(at("normed"), 0, parts.input_norm, width=width)
        heads = [(at("query"), shape.num_heads), (at("key"), shape.num_kv_heads)]
        turn = kernels.norm_and_rotate(heads, parts.head_norms, dim=shape.k_dim)
        self._norm, self._turn = norm.arguments, turn.arguments
        program.add(norm, self._product(parts.projections, "normed", *HEADS), turn)
        if planned is None:
            program.then(self._run_attention)
        else:
            attend = planned.backend.call(shape, planned.cache, self._heads(1), at("attended"))
            self._attend = attend.arguments
            program.add(attend)
        if isinstance(parts.output, SummedProduct):
            output = self._product(parts.output.product, "attended", "added")
            self._output = output.arguments
            self._add_summed(program, output, parts.output)
        else:
            program.then(self._run_output)
        first = kernels.norm(at("middle"), 0, parts.attended_norm, width=width, added=at("added"))
        self._first_add = first.arguments
        program.add(first, kernels.norm(at("normed"), at("middle"), parts.mlp_norm, width=width))
        if isinstance(parts.mlp, GatedMLP):
            program.add(*self._gated(parts.mlp))
            down = self._product(parts.mlp.down.product, "gated", "added")
            self._add_summed(program, down, parts.mlp.down)
        else:
            program.then(self._run_mlp)
        last = kernels.norm(0, at("middle"), parts.added_norm, width=width, added=at("added"))
        self._last_add = last.arguments
        program.add(last)
        self._program = program.parts()
        self._version, self._cache = room.version, None if planned is None else planned.cache

    def _heads(self, num_tokens: int) -> list[torch.Tensor]:
        """Queries, keys and values [T, heads, dim] in the room."""
        shape, rows = self._call.shape, self._room.rows
        return [
            rows("query", num_tokens, shape.num_heads, shape.k_dim),
            rows("key", num_tokens, shape.num_kv_heads, shape.k_dim),
            rows("value", num_tokens, shape.num_kv_heads, shape.v_dim),
        ]

    def _product(self, product: JointProduct, rows: str, *outputs: str) -> Call:
        at = self._room.address
        return product.call(at(rows), [at(each) for each in outputs], at("stage"))

    def _gated(self, mlp: GatedMLP) -> list[Call]:
        at, width = self._room.address, mlp.gate_and_up.outputs[0]
        return [
            self._product(mlp.gate_and_up, "normed", "gate", "up"),
            self._kernels.gate(mlp.function, at("gated"), at("gate"), at("up"), width=width),
        ]

    def _add_summed(self, program: "_Program", call: Call, summed: SummedProduct) -> None:
        """A call that makes `added`, and where there are several ranks their sum."""
        program.add(call)
        parallel = summed.parallel
        if parallel is not None:
            width = self.parts.hidden_size
            program.then(
                lambda num_tokens: _forget(
                    parallel.all_reduce(self._room.rows("added", num_tokens, 1, width))
                )
            )

    def _run_attention(self, num_tokens: int) -> None:
        """By a backend that is no kernel of ours, or by a dry run."""
        query, key, value = self._heads(num_tokens)
        attended = self._attention.attend(self._call, query, key, value, self._mask)
        self._room.rows("attended", *attended.shape).copy_(attended)

    def _run_output(self, num_tokens: int) -> None:
        assert isinstance(self.parts.output, nn.Module)
        shape = self._call.shape
        attended = self._room.rows("attended", num_tokens, shape.num_heads, shape.v_dim)
        self._run(self.parts.output, attended.view(1, num_tokens, -1), self._first_add)

    def _run_mlp(self, num_tokens: int) -> None:
        assert isinstance(self.parts.mlp, nn.Module)
        normed = self._room.rows("normed", num_tokens, 1, self.parts.hidden_size)
        self._run(self.parts.mlp, normed.view(1, num_tokens, -1), self._last_add)

    def _run(self, module: nn.Module, inputs: torch.Tensor, add: Any) -> None:
        """What the module returns is added by the call that is told `add`.

        It gets a copy, which it may keep, or change.
        """
        match module(inputs.clone()):
            case torch.Tensor() as added:
                expected = (*inputs.shape[:2], self.parts.hidden_size)
                if added.shape == expected and added.dtype == inputs.dtype:
                    self._kept = added.contiguous()
                    add.added = self._kept.data_ptr()
                    return
        raise UnsuitedLayerError("what is added has another shape or dtype")


class _Program:
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
        self.then(_forget)
        return self._parts


def _forget(_: object) -> None:
    """Follows the last calls."""
