"""Forwards of modules that treat rows alike, so that a row gets the same bits in any batch."""

from collections.abc import Callable

import torch
from torch.nn import functional

from workers.layers.row_tiles import pad_to_vectors

# A GPU's sums over a row are split by how many rows there are; a few more cost it nothing.
NORM_ROWS = 256


class WholeVectors:
    """Stands for the forward of an elementwise function on a CPU."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._forward = forward

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.reshape(-1)
        return self._forward(pad_to_vectors(flat))[: len(flat)].view(inputs.shape)


class NormTiles:
    """Stands for the forward of a norm on a GPU: always of so many rows."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._forward = forward

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[1, T, ...] -> [1, T, ...]."""
        outputs = []
        for part in torch.split(inputs, NORM_ROWS, dim=1):
            num_rows = part.shape[1]
            missing = (0, 0) * (part.dim() - 2) + (0, NORM_ROWS - num_rows)
            outputs.append(self._forward(functional.pad(part, missing))[:, :num_rows])
        return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs, dim=1)
