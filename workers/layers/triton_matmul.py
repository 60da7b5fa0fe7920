"""Linear layers on a GPU by a kernel of our own, whose tiles don't depend on the number of rows."""

import torch

from workers.layers.triton_kernels import matmul

# Whatever the number of rows: another tile may sum in another order.
TILE_M, TILE_N = 64, 64


def triton_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[..., in], [out, in], [out] -> [..., out], as torch's linear; the inputs' dtype.

    float32 is multiplied as such, not as TF32.
    """
    return _multiply(inputs, weight, None, bias)


def triton_scaled_linear(
    inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As triton_linear; the weight has 8 bits, and each output a scale [out] float32."""
    return _multiply(inputs, weight, scale, bias)


def _multiply(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
    weight = weight.contiguous()
    num_rows, (num_outputs, num_inputs) = len(rows), weight.shape
    outputs = rows.new_empty(num_rows, num_outputs)
    if num_rows:
        grid = (-(-num_outputs // TILE_N), -(-num_rows // TILE_M))
        matmul[grid](
            rows,
            weight,
            rows if scale is None else scale,
            rows if bias is None else bias.contiguous(),
            outputs,
            num_rows,
            N=num_outputs,
            K=num_inputs,
            HAS_SCALE=scale is not None,
            HAS_BIAS=bias is not None,
            TILE_M=TILE_M,
            TILE_N=TILE_N,
            TILE_K=128 // rows.itemsize,
        )
    return outputs.view(*inputs.shape[:-1], num_outputs)
