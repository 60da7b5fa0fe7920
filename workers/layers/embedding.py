"""The token embedding, of which a rank holds a range of the vocabulary."""

import torch
from torch import nn

from workers.parallel import Shard, TensorParallel


class VocabParallelLookup:
    """Stands for the forward of an embedding whose weight is one rank's range of the vocabulary.

    The module stays what it is, so that its parameters keep their names and an embedding that
    scales or normalises does so still.
    """

    def __init__(self, embedding: nn.Embedding, shard: Shard, parallel: TensorParallel) -> None:
        self._lookup = embedding.forward
        ((self._first, self._stop),) = shard.ranges
        self._last_row = max(self._stop - self._first, 1) - 1
        self._parallel = parallel

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """[...] ids -> [..., hidden]: rows of other ranks are zero here and come by the sum."""
        rows = (input - self._first).clamp(0, self._last_row)
        foreign = (input < self._first) | (input >= self._stop)
        hidden = self._lookup(rows).masked_fill(foreign.unsqueeze(-1), 0)
        return self._parallel.all_reduce(hidden)


def shard_embedding(embedding: nn.Embedding, shard: Shard, parallel: TensorParallel) -> None:
    """Cuts the weight, without values, and puts the lookup in the forward's place."""
    weight = embedding.weight.new_empty(shard.size, embedding.embedding_dim)
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    embedding.num_embeddings = shard.size
    # A padding id is an index into the whole vocabulary, and matters to gradients alone.
    embedding.padding_idx = None
    lookup = VocabParallelLookup(embedding, shard, parallel)
    embedding.__dict__["forward"] = lookup
