"""Arithmetic on a CPU that gives a row the same bits whatever rows are beside it.

Kernels are chosen by the number of rows, and what is left over at the end of a part is computed by
other instructions: so rows go in tiles of one size, and elementwise functions get whole vectors.
"""

import torch
from torch.nn import functional

TILE_ROWS = 32
# Where a row of the inputs begins, relative to a vector, chooses MKL's kernel in small products.
COLUMN_MULTIPLE = 16
GRAIN = 1 << 15  # elements that torch gives to a thread at least
VECTORS = 64  # elements of the two vectors that torch's loops take at a time, in 16 bits


def tiled_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """[..., in], [out, in], [out] -> [..., out], as torch's linear; the inputs' dtype."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    missing = -rows.shape[1] % COLUMN_MULTIPLE
    if missing:
        rows, weight = functional.pad(rows, (0, missing)), functional.pad(weight, (0, missing))
    outputs = rows.new_empty(len(rows), len(weight))
    # A copy, even where the rows are whole tiles: views may begin anywhere in a vector.
    tile = rows.new_zeros(TILE_ROWS, rows.shape[1])
    for start in range(0, len(rows), TILE_ROWS):
        part = rows[start : start + TILE_ROWS]
        tile[: len(part)] = part
        product = functional.linear(tile, weight, bias)
        outputs[start : start + TILE_ROWS] = product[: len(part)]
    return outputs.view(*inputs.shape[:-1], len(weight))


def pad_to_vectors(flat: torch.Tensor) -> torch.Tensor:
    """[n] -> [n or a few more], which torch's threads share so that each has whole vectors."""
    num_threads = max(1, min(torch.get_num_threads(), -(-len(flat) // GRAIN)))
    return functional.pad(flat, (0, -len(flat) % (VECTORS * num_threads)))
