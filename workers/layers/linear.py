"""Linear layers of which a rank holds a part.

They know no weight format: that is the linear method's.
"""

import torch
from torch import nn
from torch.nn import functional

from workers.parallel import Shard, TensorParallel


class PlainWeights:
    """The linear method of checkpoints that aren't quantised: one weight [out, in]."""

    def create(self, source: nn.Linear, shard: Shard) -> dict[str, nn.Parameter]:
        """Parameters of this rank, without values."""
        shape = list(source.weight.shape)
        shape[shard.dim] = shard.size
        return {"weight": nn.Parameter(source.weight.new_empty(shape), requires_grad=False)}

    def shards(self, shard: Shard) -> dict[str, Shard]:
        """What of each parameter's checkpoint tensor the rank reads."""
        return {"weight": shard}

    def apply(
        self, layer: nn.Module, inputs: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return functional.linear(inputs, layer.get_parameter("weight"), bias)


class ColumnParallelLinear(nn.Module):
    """A part of the outputs; the bias is cut like the weight. No collective."""

    def __init__(self, source: nn.Linear, shard: Shard, method: PlainWeights) -> None:
        super().__init__()
        self.in_features = source.in_features
        self.out_features = shard.size
        self.method = method
        self.shards = method.shards(shard)
        for name, parameter in method.create(source, shard).items():
            self.register_parameter(name, parameter)
        self.bias: nn.Parameter | None = None
        if source.bias is not None:
            self.bias = nn.Parameter(source.bias.new_empty(shard.size), requires_grad=False)
            self.shards["bias"] = shard

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features of this rank]."""
        return self.method.apply(self, inputs, self.bias)


class RowParallelLinear(nn.Module):
    """A part of the inputs; outputs are summed over ranks, then the bias is added once."""

    def __init__(
        self, source: nn.Linear, shard: Shard, method: PlainWeights, parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.in_features = shard.size
        self.out_features = source.out_features
        self.method = method
        self.parallel = parallel
        self.shards = method.shards(shard)
        for name, parameter in method.create(source, shard).items():
            self.register_parameter(name, parameter)
        self.bias: nn.Parameter | None = None
        if source.bias is not None:
            self.bias = nn.Parameter(torch.empty_like(source.bias), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features of this rank] -> [..., out_features], the same on every rank."""
        outputs = self.parallel.all_reduce(self.method.apply(self, inputs, None))
        return outputs if self.bias is None else outputs + self.bias
