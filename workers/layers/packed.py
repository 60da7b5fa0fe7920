"""Linear layers on a CPU whose weights are packed for our kernel once they are loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from workers.layers.linear import (
    ColumnParallelLinear,
    PlainWeights,
    RowParallelLinear,
    TransposedWeights,
)
from workers.native.linear import JointProduct, LinearKernel, PackedWeight
from workers.parallel import Shard, TensorParallel


@dataclass(slots=True)
class PackedWeights:
    """A weight as `base` reads it from a checkpoint, then in panels. Of one layer."""

    base: PlainWeights | TransposedWeights
    kernel: LinearKernel
    packed: PackedWeight | None = None
    product: JointProduct | None = None

    def features(self, source: nn.Module) -> tuple[int, int]:
        return self.base.features(source)

    def create(self, source: nn.Module, shard: Shard) -> dict[str, nn.Parameter]:
        return self.base.create(source, shard)

    def shards(self, shard: Shard) -> dict[str, Shard]:
        return self.base.shards(shard)

    def finish(self, layer: nn.Module) -> None:
        """Packs the weight, which an embedding may share: that keeps it as it was.

        A layer of other numbers, or of a part in others, stays as it is.
        """
        weight = layer.get_parameter("weight").detach()
        if isinstance(self.base, TransposedWeights):
            weight = weight.T
        tensors = [weight, *layer.parameters(recurse=False)]
        inputs = weight.shape[1]
        if any(each.dtype != self.kernel.dtype for each in tensors):
            return
        if not inputs or inputs % self.kernel.inputs_multiple:
            return
        self.packed = self.kernel.pack(weight)
        layer._parameters["weight"] = nn.Parameter(self.packed.panels, requires_grad=False)

    def apply(
        self, layer: nn.Module, inputs: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self.packed is None:
            return self.base.apply(layer, inputs, bias)
        if self.product is None:  # the layer knows by now whether it adds its bias itself
            self.product = self.kernel.joint([self.packed], [bias])
        return self.product(inputs)[0]


def join_layers(layers: Sequence[nn.Module]) -> JointProduct | None:
    """The product of layers that get the same rows.

    None: one of them isn't packed, has its outputs gathered over ranks, or takes other inputs.
    """
    weights, biases, kernels = [], [], []
    for layer in layers:
        if not isinstance(layer, ColumnParallelLinear) or layer.gather is not None:
            return None
        method = layer.method
        if not isinstance(method, PackedWeights) or method.packed is None:
            return None
        weights.append(method.packed)
        biases.append(layer.bias)
        kernels.append(method.kernel)
    if len({weight.inputs for weight in weights}) != 1:
        return None
    return kernels[0].joint(weights, biases)


@dataclass(frozen=True, slots=True)
class SummedProduct:
    """A product that the layer sums over ranks, where there are several, and then returns."""

    product: JointProduct
    parallel: TensorParallel | None


def summed_product(layer: nn.Module) -> SummedProduct | None:
    """None: the layer isn't packed, takes its part of the inputs itself, or adds a bias after."""
    if not isinstance(layer, RowParallelLinear):
        whole = join_layers([layer])
        return None if whole is None else SummedProduct(whole, None)
    method = layer.method
    if not isinstance(method, PackedWeights) or method.packed is None:
        return None
    if layer.part is not None or layer.bias is not None:
        return None
    parallel = layer.parallel if layer.parallel.size > 1 else None
    return SummedProduct(method.kernel.joint([method.packed], [None]), parallel)


@contextmanager
def packing_what_runs(model: nn.Module) -> Iterator[None]:
    """Packs the weights of layers that ran within, when it ends.

    Of others a model's code may read the weights by itself. One weight at a time is there twice.
    """
    methods = {
        module: method
        for module in model.modules()
        if isinstance(method := getattr(module, "method", None), PackedWeights)
    }
    ran: set[nn.Module] = set()
    hooks = [module.register_forward_hook(lambda layer, *_: ran.add(layer)) for module in methods]
    yield
    for hook in hooks:
        hook.remove()
    for layer, method in methods.items():
        if layer in ran:
            method.finish(layer)
