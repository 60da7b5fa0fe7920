"""A decoder layer of the common shape, computed by our kernels in place of transformers' code."""

from dataclasses import dataclass

import torch
from torch import nn

from workers.layers.paged_attention import AttentionCall, PagedAttention
from workers.native.decoder import LANES, DecoderKernels, Gate, Norm
from workers.native.linear import JointProduct


class UnsuitedLayerError(Exception):
    """What a layer gets or computes on the way isn't what our kernels take."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(function(gate(x)) * up(x))."""

    kernels: DecoderKernels
    gate_and_up: JointProduct
    function: Gate
    down: nn.Module

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]."""
        gate, up = self.gate_and_up(inputs)
        product: torch.Tensor = self.down(self.kernels.gate(self.function, gate, up))
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class LeanLayer:
    """Stands for the forward of a decoder layer."""

    kernels: DecoderKernels
    attention: PagedAttention
    call: AttentionCall
    input_norm: Norm
    projections: JointProduct  # queries, keys, values
    head_norms: tuple[Norm | None, Norm | None]  # of queries and keys
    output: nn.Module
    attended_norm: Norm | None  # of what attention adds
    mlp_norm: Norm
    mlp: GatedMLP | nn.Module
    added_norm: Norm | None  # of what the MLP adds

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
        kernels, shape = self.kernels, self.call.shape
        self._check(hidden_states)
        hidden = hidden_states.contiguous()
        num_tokens = hidden.shape[1]
        cosine, sine = self._turns(position_embeddings, num_tokens)
        query, key, value = self.projections(kernels.norm(hidden, self.input_norm))
        kernels.norm_and_rotate((query, key), self.head_norms, cosine, sine, dim=shape.k_dim)
        attended = self.attention.attend(
            self.call,
            query.view(num_tokens, -1, shape.k_dim),
            key.view(num_tokens, -1, shape.k_dim),
            value.view(num_tokens, -1, shape.v_dim),
            attention_mask,
        )
        added = self.output(attended.reshape(1, num_tokens, -1))
        hidden = self._add(hidden, added, self.attended_norm)
        added = self.mlp(kernels.norm(hidden, self.mlp_norm))
        return self._add(hidden, added, self.added_norm)

    def _check(self, hidden: torch.Tensor) -> None:
        weight = self.input_norm.weight
        is_batch = hidden.dim() == 3 and len(hidden) == 1
        if not is_batch or hidden.shape[2:] != weight.shape or hidden.dtype != weight.dtype:
            raise UnsuitedLayerError(f"hidden states {list(hidden.shape)} {hidden.dtype}")

    def _turns(self, embeddings: object, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [1, T, rotary] for halves that vectors divide."""
        match embeddings:
            case (torch.Tensor() as cosine, torch.Tensor() as sine):
                rotary = cosine.shape[-1]
                is_suited = (
                    cosine.shape == sine.shape == (1, num_tokens, rotary)
                    and cosine.dtype == sine.dtype == self.input_norm.weight.dtype
                    and rotary <= self.call.shape.k_dim
                    and rotary % (2 * LANES) == 0
                )
                if is_suited:
                    return cosine.contiguous(), sine.contiguous()
        raise UnsuitedLayerError(
            "no cosine and sine of all tokens, in halves, of the model's dtype"
        )

    def _add(self, hidden: torch.Tensor, added: object, norm: Norm | None) -> torch.Tensor:
        match added:
            case torch.Tensor(shape=hidden.shape, dtype=hidden.dtype):
                return self.kernels.add(hidden, added.contiguous(), norm)
        raise UnsuitedLayerError("what is added has another shape or dtype")
