"""Linear layers whose weights have 8 bits, made of a checkpoint's as it is loaded."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from workers.layers.linear import PlainWeights, Product, TransposedWeights
from workers.parallel import Shard

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max

# Inputs [..., in], weight [out, in] FP8, scale [out] float32, bias [out] -> [..., out].
ScaledProduct = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]


@dataclass(frozen=True, slots=True)
class Fp8Weights:
    """A weight in FP8, as `base` lays it out, and one float32 scale for each output.

    The scale is that of the output's whole row, also where a rank has a part of the inputs: ranks
    together have the weights that one would have.
    """

    base: PlainWeights | TransposedWeights
    product: ScaledProduct

    @property
    def output_dim(self) -> int:
        """The weight's."""
        return 1 if isinstance(self.base, TransposedWeights) else 0

    def features(self, source: nn.Module) -> tuple[int, int]:
        return self.base.features(source)

    def create(self, source: nn.Module, shard: Shard) -> dict[str, nn.Parameter]:
        weight = self.base.create(source, shard)["weight"].to(FP8)
        scale = weight.new_empty(weight.shape[self.output_dim], dtype=torch.float32)
        return {
            "weight": nn.Parameter(weight, requires_grad=False),
            "scale": nn.Parameter(scale, requires_grad=False),
        }

    def shards(self, shard: Shard) -> dict[str, Shard]:
        """The scale has no tensor in the checkpoint."""
        return self.base.shards(shard)

    def apply(
        self, layer: nn.Module, inputs: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        weight = layer.get_parameter("weight")
        by_output = weight.T if self.output_dim else weight
        return self.product(inputs, by_output, layer.get_parameter("scale"), bias)


def find_scale(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] float32 -> [out]: the largest number of a row becomes FP8's largest."""
    largest = weight.abs().amax(dim=1)
    return torch.where(largest > 0, largest / LARGEST, 1.0)


def quantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[out, in] float32, [out] -> [out, in] FP8."""
    return (weight / scale[:, None]).clamp_(-LARGEST, LARGEST).to(FP8)


def dequantised(product: Product) -> ScaledProduct:
    """Makes a weight in the inputs' dtype for each use, which costs time and a layer's memory."""

    def multiply(
        inputs: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return product(inputs, (weight.float() * scale[:, None]).to(inputs.dtype), bias)

    return multiply
