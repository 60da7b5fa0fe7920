"""Which linear layers of a model are stored and multiplied how."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from workers.errors import ModelError
from workers.layers.fp8 import Fp8Weights, ScaledProduct, dequantised
from workers.layers.linear import LinearMethod, PlainWeights, Product, TransposedWeights
from workers.layers.packed import PackedWeights
from workers.layers.row_tiles import tiled_linear
from workers.native.linear import LinearKernel, linear_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearMethods:
    """What linear layers get. `of_head` has its own rule: the head is often the embedding, too."""

    product: Product = functional.linear
    fp8: ScaledProduct | None = None  # where weights get 8 bits
    kernel: LinearKernel | None = None  # for weights that are packed; `product` for the rest

    @property
    def replace_all(self) -> bool:
        """Whether layers that aren't cut need a method, too."""
        return self != LinearMethods()

    def of(self, module: nn.Module) -> LinearMethod | None:
        """How a module stores its weights; None where it is no linear layer that can be cut."""
        plain = self._plain(module)
        if plain is None or self.fp8 is None:
            return self.of_head(module)
        return Fp8Weights(plain, self.fp8)

    def of_head(self, module: nn.Module) -> LinearMethod | None:
        """As `of`, in the model's own dtype."""
        plain = self._plain(module)
        if plain is None or self.kernel is None:
            return plain
        return PackedWeights(plain, self.kernel)

    def _plain(self, module: nn.Module) -> PlainWeights | TransposedWeights | None:
        # Subclasses compute something else.
        if type(module) is nn.Linear:
            return PlainWeights(self.product)
        return TransposedWeights(self.product) if type(module) is Conv1D else None


def choose_methods(
    device: torch.device, dtype: torch.dtype, *, deterministic: bool, quantization: str
) -> LinearMethods:
    """Raises ModelError: the device needs triton, which isn't installed."""
    if quantization not in ("none", "fp8"):
        raise ModelError(f"quantization={quantization} must be none or fp8")
    has_fp8 = quantization == "fp8"
    if device.type == "cpu":
        product = tiled_linear if deterministic else functional.linear
        return LinearMethods(
            product=product,
            fp8=dequantised(product) if has_fp8 else None,
            kernel=linear_kernel(dtype),
        )
    if not deterministic and not has_fp8:
        return LinearMethods()
    try:
        from workers.layers.triton_matmul import triton_linear, triton_scaled_linear
    except ImportError as error:
        option = "deterministic" if deterministic else "quantization=fp8"
        raise ModelError(
            f"{option} needs triton on this device, which can't be imported ({error}): install "
            "it, or leave the option away"
        ) from error
    return LinearMethods(
        product=triton_linear if deterministic else functional.linear,
        fp8=triton_scaled_linear if has_fp8 else None,
    )
