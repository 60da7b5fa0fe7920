"""A decoder layer of the common shape, computed by our kernels in place of transformers' code."""

from dataclasses import dataclass

import torch
from torch import nn

from workers.layers.paged_attention import AttentionCall, PagedAttention
from workers.native.decoder import DecoderKernels, Gate, Norm
from workers.native.linear import JointProduct


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
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: object,
    ) -> torch.Tensor:
        """[1, T, hidden] -> [1, T, hidden]."""
        assert position_embeddings is not None, "the layer that this stands for gets them"
        kernels, shape = self.kernels, self.call.shape
        hidden = hidden_states.contiguous()
        dtype = hidden.dtype
        query, key, value = self.projections(kernels.norm(hidden, self.input_norm))
        cosine, sine = (each.to(dtype).contiguous() for each in position_embeddings)
        kernels.norm_and_rotate((query, key), self.head_norms, cosine, sine, dim=shape.k_dim)
        num_tokens = hidden.shape[1]
        attended = self.attention.attend(
            self.call,
            query.view(num_tokens, -1, shape.k_dim),
            key.view(num_tokens, -1, shape.k_dim),
            value.view(num_tokens, -1, shape.v_dim),
            attention_mask,
        )
        added = self.output(attended.reshape(1, num_tokens, -1))
        hidden = kernels.add(hidden, added, self.attended_norm)
        added = self.mlp(kernels.norm(hidden, self.mlp_norm))
        return kernels.add(hidden, added, self.added_norm)
