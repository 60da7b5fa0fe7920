"""Linear layers of which a rank holds a part.

They know no weight format: that is the linear method's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from workers.parallel import Shard, TensorParallel

# Inputs [..., in], weight [out, in], bias [out] -> [..., out].
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class LinearMethod(Protocol):
    """How the weights of a linear layer are stored and applied."""

    def features(self, source: nn.Module) -> tuple[int, int]:
        """Inputs and outputs of the whole layer."""
        ...

    def create(self, source: nn.Module, shard: Shard) -> dict[str, nn.Parameter]:
        """Parameters of this rank, without values."""
        ...

    def shards(self, shard: Shard) -> dict[str, Shard]:
        """What of each parameter's checkpoint tensor the rank reads."""
        ...

    def apply(
        self, layer: nn.Module, inputs: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """Layers that aren't quantised: one weight [out, in]. A shard's dim 0 is outputs, 1 inputs."""

    product: Product = functional.linear

    def features(self, source: nn.Module) -> tuple[int, int]:
        outputs, inputs = source.get_parameter("weight").shape
        return inputs, outputs

    def create(self, source: nn.Module, shard: Shard) -> dict[str, nn.Parameter]:
        return {"weight": empty_part(source.get_parameter("weight"), shard)}

    def shards(self, shard: Shard) -> dict[str, Shard]:
        return {"weight": shard}

    def apply(
        self, layer: nn.Module, inputs: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self.product(inputs, layer.get_parameter("weight"), bias)


@dataclass(frozen=True, slots=True)
class TransposedWeights:
    """GPT-2's: one weight [in, out]. A shard's dim 0 is still outputs, 1 inputs."""

    product: Product = functional.linear

    def features(self, source: nn.Module) -> tuple[int, int]:
        inputs, outputs = source.get_parameter("weight").shape
        return inputs, outputs

    def create(self, source: nn.Module, shard: Shard) -> dict[str, nn.Parameter]:
        weight = source.get_parameter("weight")
        return {"weight": empty_part(weight, self.shards(shard)["weight"])}

    def shards(self, shard: Shard) -> dict[str, Shard]:
        return {"weight": Shard(dim=1 - shard.dim, ranges=shard.ranges, size=shard.size)}

    def apply(
        self, layer: nn.Module, inputs: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self.product(inputs, layer.get_parameter("weight").T, bias)


def empty_part(tensor: torch.Tensor, shard: Shard) -> nn.Parameter:
    """Room for a part of a parameter, without values."""
    shape = list(tensor.shape)
    shape[shard.dim] = shard.size
    return nn.Parameter(tensor.new_empty(shape), requires_grad=False)


class ColumnParallelLinear(nn.Module):
    """A part of the outputs; the bias is cut like the weight."""

    def __init__(
        self,
        source: nn.Module,
        shard: Shard,
        method: LinearMethod,
        *,
        gather: TensorParallel | None = None,
    ) -> None:
        """Without `gather` there is no collective; with it every rank gets all outputs."""
        super().__init__()
        self.in_features = method.features(source)[0]
        self.out_features = shard.size
        self.method = method
        self.gather = gather
        self.shards = method.shards(shard)
        for name, parameter in method.create(source, shard).items():
            self.register_parameter(name, parameter)
        self.bias: nn.Parameter | None = None
        if isinstance(source.bias, nn.Parameter):
            self.bias = empty_part(source.bias, shard)
            self.shards["bias"] = shard

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features of this rank, or of all]."""
        outputs = self.method.apply(self, inputs, self.bias)
        return outputs if self.gather is None else self.gather.all_gather(outputs)


class RowParallelLinear(nn.Module):
    """A part of the inputs; outputs are summed over ranks, then the bias is added once."""

    def __init__(
        self,
        source: nn.Module,
        shard: Shard,
        method: LinearMethod,
        parallel: TensorParallel,
        *,
        takes_all: bool = False,
    ) -> None:
        """With `takes_all` the inputs come whole on every rank, and it takes its part."""
        super().__init__()
        self.in_features = shard.size
        self.out_features = method.features(source)[1]
        self.method = method
        self.parallel = parallel
        self.part = shard.ranges[0] if takes_all else None
        self.shards = method.shards(shard)
        for name, parameter in method.create(source, shard).items():
            self.register_parameter(name, parameter)
        self.bias: nn.Parameter | None = None
        if isinstance(source.bias, nn.Parameter):
            self.bias = nn.Parameter(torch.empty_like(source.bias), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features of this rank, or of all] -> [..., out_features], equal on all ranks."""
        if self.part is not None:
            inputs = inputs[..., slice(*self.part)]
        outputs = self.parallel.all_reduce(self.method.apply(self, inputs, None))
        return outputs if self.bias is None else outputs + self.bias
