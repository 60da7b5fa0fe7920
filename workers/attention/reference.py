"""Attention in plain torch: slow, runs everywhere, the oracle of the other backends."""

import torch

from workers.attention.base import AttentionMetadata
from workers.kv_cache import LayerCache


class ReferenceAttention:
    """One sequence at a time, in float32."""

    name = "reference"
    block_size_multiple = 1

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
        softcap: float,
    ) -> torch.Tensor:
        """As AttentionBackend says."""
        cache.key.flatten(0, 1)[metadata.slots] = key
        cache.value.flatten(0, 1)[metadata.slots] = value
        output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        block_size = cache.key.shape[1]
        start = 0
        first_blocks = metadata.first_blocks.tolist()
        for row, (seq_len, query_len) in enumerate(metadata.extents):
            total = seq_len + query_len
            # Nothing before the first query's window is read: its blocks may belong to others.
            first = max(0, seq_len + 1 - window) if window else 0
            places = slice(
                first // block_size - first_blocks[row],
                -(-total // block_size) - first_blocks[row],
            )
            blocks = metadata.block_tables[row, places]
            inner = slice(first % block_size, first % block_size + total - first)
            keys = cache.key[blocks].flatten(0, 1)[inner]
            values = cache.value[blocks].flatten(0, 1)[inner]
            mask = _visible(seq_len, query_len, first, window, query.device)
            rows = slice(start, start + query_len)
            output[rows] = _attend_one(query[rows], keys, values, mask, scale, softcap)
            start += query_len
        return output


def _visible(
    seq_len: int, query_len: int, first: int, window: int, device: torch.device
) -> torch.Tensor | None:
    """[query_len, keys] bool, keys from position `first` on; None where a query sees all keys."""
    if query_len == 1:
        return None
    queries = torch.arange(seq_len, seq_len + query_len, device=device)[:, None]
    keys = torch.arange(first, seq_len + query_len, device=device)
    visible = keys <= queries
    return visible & (keys > queries - window) if window else visible


def _attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Query [Q, Hq, K], key [L, H, K], value [L, H, V] -> [Q, Hq, V] in value's dtype."""
    num_queries, num_heads, _ = query.shape
    # The heads that share a KV head become rows of one matrix: [H, Hq / H * Q, K].
    grouped = query.float().transpose(0, 1).reshape(key.shape[1], -1, query.shape[2])
    scores = grouped @ key.float().permute(1, 2, 0) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        by_query = scores.view(key.shape[1], -1, num_queries, key.shape[0])
        by_query.masked_fill_(~visible, float("-inf"))
    attended = scores.softmax(dim=-1) @ value.float().transpose(0, 1)
    return attended.reshape(num_heads, num_queries, -1).transpose(0, 1).to(value.dtype)
