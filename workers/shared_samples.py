"""What the last steps sampled, on every rank: later steps may feed it."""

import torch

from workers.batch import NUM_SHARED_STEPS, Batch
from workers.parallel import TensorParallel


class SharedSamples:
    """Keeps the samples of the last NUM_SHARED_STEPS steps that share theirs."""

    def __init__(self, parallel: TensorParallel) -> None:
        self._parallel = parallel
        self._of: dict[int, torch.Tensor] = {}  # by step: [R] int64

    def share(self, batch: Batch, token_ids: torch.Tensor | None) -> None:
        """Tells all ranks the sampler's `token_ids` [R] int64, if the step is to; others have None.

        The other ranks wait for it.
        """
        if not batch.shares_samples:
            return
        if token_ids is None:
            token_ids = torch.zeros(len(batch.sample_index), dtype=torch.int64)
        self._of[batch.step_id] = self._parallel.broadcast_from_sampler(token_ids)
        self._of.pop(batch.step_id - NUM_SHARED_STEPS, None)

    def resolve(self, batch: Batch) -> torch.Tensor:
        """[T] int32 the ids to feed: those of the plan, and samples where it refers to them."""
        refer = batch.references
        if len(refer.rows) == 0:
            return batch.input_ids
        input_ids = batch.input_ids.clone()
        for step_id in set(refer.step_ids.tolist()):
            where = refer.step_ids == step_id
            samples = self._of[step_id][refer.sample_rows[where]]
            input_ids[refer.rows[where]] = samples.to(torch.int32)
        return input_ids
