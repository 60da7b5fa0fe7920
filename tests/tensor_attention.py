"""Decode attention in tensor operations alone, as a CUDA graph could hold it; for tests."""

import torch

from workers.attention.base import AttentionMetadata
from workers.kv_cache import LayerCache


class TensorAttention:
    """Every sequence is fed one token, and all of its table's blocks are gathered."""

    name = "tensors"
    takes_fp8_cache = False
    block_size_multiple = 1
    is_capturable = True

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int,
        chunk: int,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As AttentionBackend says."""
        assert metadata.max_query_len == 1
        assert not chunk
        assert not softcap
        assert sinks is None
        cache.key[metadata.slot_blocks, metadata.slot_offsets] = key
        cache.value[metadata.slot_blocks, metadata.slot_offsets] = value
        block_size = cache.key.shape[1]
        tables = metadata.block_tables.long()
        keys = cache.key[tables].flatten(1, 2).float()  # [S, L, H, K]
        values = cache.value[tables].flatten(1, 2).float()
        grouped = query.float().unflatten(1, (key.shape[1], -1))  # [S, H, Hq / H, K]
        scores = torch.einsum("shgk,slhk->shgl", grouped, keys) * scale
        places = torch.arange(keys.shape[1]) + metadata.first_blocks[:, None] * block_size
        own = metadata.seq_lens[:, None]
        seen = places <= own
        if window:
            seen &= places > own - window
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        # What nobody wrote may be no number.
        values = values.masked_fill(~seen[:, :, None, None], 0)
        attended = torch.einsum("shgl,slhv->shgv", scores.softmax(dim=-1), values)
        return attended.flatten(1, 2).to(value.dtype)
