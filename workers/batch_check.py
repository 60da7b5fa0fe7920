"""Whether a batch fits a model and its cache, for callers in this process.

What comes over the wire is checked as it is decoded.
"""

import torch

from workers.batch import Batch
from workers.config import CacheLayout
from workers.errors import StepError


def check_batch(batch: Batch, layout: CacheLayout, *, vocab_size: int, max_model_len: int) -> None:
    """Ids that point outside would read foreign memory on a GPU.

    Raises StepError: the message names the array and its limit.
    """
    if len(batch.block_tables) != len(layout.groups):
        raise StepError(
            f"{len(batch.block_tables)} block tables must be {len(layout.groups)}, "
            "one per cache group"
        )
    num_tokens = len(batch.input_ids)
    _check_range("input_ids", batch.input_ids, vocab_size)
    _check_range("positions", batch.positions, max_model_len)
    _check_range("sample_index", batch.sample_index, num_tokens)
    _check_range("score_index", batch.score_index, num_tokens)
    _check_range("score_token_ids", batch.score_token_ids, vocab_size)
    if int(batch.query_lens.sum()) != num_tokens or bool((batch.query_lens < 1).any()):
        raise StepError(f"query_lens must be at least 1, and sum to the {num_tokens} input_ids")
    blocks = -(-(batch.seq_lens + batch.query_lens) // layout.block_size)
    for tables in batch.block_tables:
        if bool((blocks - tables.first_blocks > tables.block_ids.shape[1]).any()):
            raise StepError("block_ids must reach to the end of each sequence")
        if bool((tables.first_blocks * layout.block_size > batch.seq_lens).any()):
            raise StepError("first_blocks must not be past the first token fed")
        _check_range("block_ids", tables.block_ids, layout.num_blocks)
    _check_range("block_copies", batch.block_copies, layout.num_blocks)


def _check_range(name: str, values: torch.Tensor, limit: int) -> None:
    if values.numel() == 0:
        return
    low, high = (int(extreme) for extreme in values.aminmax())
    if low < 0 or high >= limit:
        raise StepError(f"{name} from {low} to {high} must be in [0, {limit})")
