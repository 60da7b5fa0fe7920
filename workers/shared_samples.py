"""What the last steps sampled, on every rank: later steps may feed it."""

import torch

from workers.batch import NUM_SHARED_STEPS, Batch
from workers.parallel import CPU, TensorParallel
from workers.staging import upload


class SharedSamples:
    """Keeps the samples of the last NUM_SHARED_STEPS steps that share theirs, on one device."""

    def __init__(self, parallel: TensorParallel, device: torch.device = CPU) -> None:
        self._parallel = parallel
        self._device = device
        self._of: dict[int, torch.Tensor] = {}  # by step: [R] int64

    def share(self, batch: Batch, token_ids: torch.Tensor | None) -> None:
        """Tells all ranks the sampler's `token_ids` [R] int64, if the step is to; others have None.

        On the CPU the other ranks wait for it, on a device their streams do.
        """
        if not batch.shares_samples:
            return
        if token_ids is None:
            token_ids = torch.zeros(len(batch.sample_index), dtype=torch.int64, device=self._device)
        self._of[batch.step_id] = self._parallel.broadcast_from_sampler(token_ids)
        self._of.pop(batch.step_id - NUM_SHARED_STEPS, None)

    def resolve(self, batch: Batch, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int32 the ids to feed: those of the plan, and samples where it refers to them.

        `input_ids` are the batch's, on the device; they stay as they are.
        """
        refer = batch.references
        if len(refer.rows) == 0:
            return input_ids
        input_ids = input_ids.clone()
        for step_id in set(refer.step_ids.tolist()):
            where = refer.step_ids == step_id
            places = upload(refer.rows[where], self._device)
            samples = self._of[step_id][upload(refer.sample_rows[where], self._device)]
            input_ids[places] = samples.to(torch.int32)
        return input_ids
