"""Makes weights of 8 bits of a checkpoint's, a few outputs at a time."""

from collections.abc import Callable

import torch

from workers.layers.fp8 import find_scale, quantise
from workers.loading.unread import AnyTensor, UnreadTensor, cut
from workers.parallel import Shard

OUTPUTS = 256  # at a time

# Fills a tensor with another, or one that isn't read yet.
Read = Callable[[torch.Tensor, torch.Tensor | UnreadTensor], None]


def quantise_into(
    weight: torch.Tensor,
    scale: torch.Tensor,
    whole: AnyTensor,
    shard: Shard | None,
    *,
    output_dim: int,
    read: Read,
) -> None:
    """Fills this rank's weight and scale [its outputs] from the whole tensor.

    That is [out, in], or [in, out] where `output_dim` is 1.

    Where the shard is one of inputs all of them are read: an output has one scale on all ranks.
    """
    of_outputs = shard is not None and shard.dim == output_dim
    source = cut(whole, shard) if of_outputs else whole
    for start in range(0, len(scale), OUTPUTS):
        length = min(OUTPUTS, len(scale) - start)
        part = source.narrow(output_dim, start, length)
        values = torch.empty(tuple(part.shape), device=weight.device)
        read(values, part)
        by_output = values.T if output_dim else values
        scale[start : start + length] = find_scale(by_output)
        if not of_outputs:
            values = cut(values, shard)
            by_output = values.T if output_dim else values
        made = quantise(by_output, scale[start : start + length])
        weight.narrow(output_dim, start, length).copy_(made.T if output_dim else made)
