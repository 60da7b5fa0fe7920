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
from workers.layers.paged_attention import AttentionCall, PagedAttention
from workers.native.calls import Call, Calls
from workers.native.decoder import LANES, DecoderKernels, Gate, Norm
from workers.native.linear import JointProduct


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
        self._version = 0  # of the room for which there are calls
        self._kept: torch.Tensor | None = None  # what a module returned, while kernels read it
        names = ("normed", "middle", "added")
        room.reserve(dict.fromkeys(names, parts.hidden_size))
        room.reserve(dict(zip(("query", "key", "value"), parts.projections.outputs, strict=True)))
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
        room, shape = self._room, self._call.shape
        room.prepare(num_tokens)
        if self._version != room.version:
            self._place()
        self._norm.rows = self._first_add.rows = hidden.data_ptr()
        self._turn.cosine, self._turn.sine = cosine.data_ptr(), sine.data_ptr()
        self._turn.rotary = cosine.shape[-1]
        self._before(num_tokens)
        attended = self._attention.attend(
            self._call,
            room.rows("query", num_tokens, shape.num_heads, shape.k_dim),
            room.rows("key", num_tokens, shape.num_kv_heads, shape.k_dim),
            room.rows("value", num_tokens, shape.num_kv_heads, shape.v_dim),
            attention_mask,
        ).contiguous()
        if isinstance(self.parts.output, SummedProduct):
            self._output.rows = attended.data_ptr()
        else:
            self._run(self.parts.output, attended.view(1, num_tokens, -1), self._first_add)
        made = torch.empty_like(hidden)
        self._last_add.output = made.data_ptr()
        for calls, then in self._after:
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

    def _place(self) -> None:
        """Writes down all calls, for the room as it is now."""
        room, parts, shape, kernels = self._room, self.parts, self._call.shape, self._kernels
        at, width, dim = room.address, parts.hidden_size, self._call.shape.k_dim
        norm = kernels.norm(at("normed"), 0, parts.input_norm, width=width)
        projected = self._product(parts.projections, "normed", "query", "key", "value")
        heads = [(at("query"), shape.num_heads), (at("key"), shape.num_kv_heads)]
        turn = kernels.norm_and_rotate(heads, parts.head_norms, dim=dim)
        self._norm, self._turn = norm.arguments, turn.arguments
        self._before = Calls([norm, projected, turn])

        program: list[tuple[list[Call], Callable[[int], None]]] = []
        calls: list[Call] = []
        if isinstance(parts.output, SummedProduct):
            output = self._product(parts.output.product, "normed", "added")
            self._output = output.arguments
            calls = self._summed(program, [output], parts.output)
        first = kernels.norm(at("middle"), 0, parts.attended_norm, width=width, added=at("added"))
        self._first_add = first.arguments
        calls += [first, kernels.norm(at("normed"), at("middle"), parts.mlp_norm, width=width)]
        if isinstance(parts.mlp, GatedMLP):
            calls = self._summed(program, calls + self._gated(parts.mlp), parts.mlp.down)
        else:
            program.append((calls, self._run_mlp))
            calls = []
        last = kernels.norm(0, at("middle"), parts.added_norm, width=width, added=at("added"))
        self._last_add = last.arguments
        program.append(([*calls, last], _nothing))
        self._after = [(Calls(each), then) for each, then in program]
        self._version = room.version

    def _product(self, product: JointProduct, rows: str, *outputs: str) -> Call:
        at = self._room.address
        return product.call(at(rows), [at(each) for each in outputs], at("stage"))

    def _gated(self, mlp: GatedMLP) -> list[Call]:
        at, width = self._room.address, mlp.gate_and_up.outputs[0]
        return [
            self._product(mlp.gate_and_up, "normed", "gate", "up"),
            self._kernels.gate(mlp.function, at("gated"), at("gate"), at("up"), width=width),
            self._product(mlp.down.product, "gated", "added"),
        ]

    def _summed(
        self,
        program: list[tuple[list[Call], Callable[[int], None]]],
        calls: list[Call],
        last: SummedProduct,
    ) -> list[Call]:
        """Where there are several ranks, `added`, which calls make, is summed after them.

        Returns those that the next ones follow.
        """
        parallel = last.parallel
        if parallel is None:
            return calls

        def reduce(num_tokens: int) -> None:
            parallel.all_reduce(self._room.rows("added", num_tokens, 1, self.parts.hidden_size))

        program.append((calls, reduce))
        return []

    def _run_mlp(self, num_tokens: int) -> None:
        assert isinstance(self.parts.mlp, nn.Module)
        width = self.parts.hidden_size
        # A copy: a module may change or keep what it gets.
        normed = self._room.rows("normed", num_tokens, 1, width).view(1, num_tokens, width).clone()
        self._run(self.parts.mlp, normed, self._last_add)

    def _run(self, module: nn.Module, inputs: torch.Tensor, add: Any) -> None:
        """What the module returns is added by the call that is told `add`."""
        match module(inputs):
            case torch.Tensor() as added:
                expected = (*inputs.shape[:2], self.parts.hidden_size)
                if added.shape == expected and added.dtype == inputs.dtype:
                    self._kept = added.contiguous()
                    add.added = self._kept.data_ptr()
                    return
        raise UnsuitedLayerError("what is added has another shape or dtype")


def _nothing(_: int) -> None:
    """Follows the last calls."""
