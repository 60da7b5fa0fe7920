"""Attention in plain torch: slow, runs everywhere, the oracle of the other backends."""

from collections.abc import Iterator

import torch

from workers.attention.base import AttentionMetadata
from workers.attention.write import write_kv
from workers.kv_cache import LayerCache


class ReferenceAttention:
    """One sequence at a time, in float32."""

    name = "reference"
    block_size_multiple = 1
    is_capturable = False
    takes_fp8_cache = True

    def __init__(self, *, deterministic: bool = False) -> None:
        """Where `deterministic`, one query at a time: its bits depend on its sequence alone."""
        self._deterministic = deterministic

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
        write_kv(key, value, cache, metadata)
        output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        block_size = cache.key.shape[1]
        start = 0
        first_blocks = metadata.first_blocks.tolist()
        for row, seq_len, query_len in self._parts(metadata):
            total = seq_len + query_len
            # Nothing before what the first query sees is read: its blocks may belong to others.
            first = _first_seen(seq_len, window, chunk)
            places = slice(
                first // block_size - first_blocks[row],
                -(-total // block_size) - first_blocks[row],
            )
            blocks = metadata.block_tables[row, places]
            inner = slice(first % block_size, first % block_size + total - first)
            keys = cache.key[blocks].flatten(0, 1)[inner]
            values = cache.value[blocks].flatten(0, 1)[inner]
            mask = _visible(seq_len, query_len, first, window, chunk, query.device)
            rows = slice(start, start + query_len)
            own = query[rows]
            if self._deterministic:  # where it lies among others must not choose a kernel
                own = own.clone(memory_format=torch.contiguous_format)
            output[rows] = _attend_one(own, keys, values, mask, scale, softcap, sinks)
            start += query_len
        return output

    def _parts(self, metadata: AttentionMetadata) -> Iterator[tuple[int, int, int]]:
        """(row of the tables, tokens before, queries) of what is computed at once, in order."""
        for row, (seq_len, query_len) in enumerate(metadata.extents):
            if not self._deterministic:
                yield row, seq_len, query_len
                continue
            for place in range(seq_len, seq_len + query_len):
                yield row, place, 1


def _first_seen(position: int, window: int, chunk: int) -> int:
    """Place of the first key that the query at `position` sees."""
    if chunk:
        return position // chunk * chunk
    return max(0, position + 1 - window) if window else 0


def _visible(
    seq_len: int, query_len: int, first: int, window: int, chunk: int, device: torch.device
) -> torch.Tensor | None:
    """[query_len, keys] bool, keys from position `first` on; None where a query sees all keys."""
    if query_len == 1:
        return None
    queries = torch.arange(seq_len, seq_len + query_len, device=device)[:, None]
    keys = torch.arange(first, seq_len + query_len, device=device)
    visible = keys <= queries
    if chunk:
        return visible & (keys >= queries // chunk * chunk)
    return visible & (keys > queries - window) if window else visible


def _attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Query [Q, Hq, K], key [L, H, K], value [L, H, V] -> [Q, Hq, V] in query's dtype."""
    num_queries, num_heads, _ = query.shape
    # The heads that share a KV head become rows of one matrix: [H, Hq / H * Q, K].
    grouped = query.float().transpose(0, 1).reshape(key.shape[1], -1, query.shape[2])
    scores = grouped @ key.float().permute(1, 2, 0) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        by_query = scores.view(key.shape[1], -1, num_queries, key.shape[0])
        by_query.masked_fill_(~visible, float("-inf"))
    if sinks is not None:
        by_row = sinks.float().reshape(key.shape[1], -1, 1).repeat_interleave(num_queries, dim=1)
        scores = torch.cat((scores, by_row), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[0]]  # what a sink gets is lost
    attended = weights @ value.float().transpose(0, 1)
    return attended.reshape(num_heads, num_queries, -1).transpose(0, 1).to(query.dtype)
