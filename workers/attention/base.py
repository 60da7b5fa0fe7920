"""What attention backends take, and the step's metadata that they share."""

from dataclasses import dataclass
from typing import Protocol

import torch

from workers.batch import Batch, BlockTables
from workers.kv_cache import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One step for the layers of one cache group; tensors on the device.

    The table of sequence s starts at block `first_blocks[s]` of the sequence: a backend shifts
    lengths by `first_blocks * block_size`. Every block that a query of the group's layers sees is
    in it.
    """

    seq_lens: torch.Tensor  # [S] int32, tokens in the cache before the step
    query_lens: torch.Tensor  # [S] int32, tokens fed
    query_starts: torch.Tensor  # [S + 1] int32, first row of each sequence in T
    block_tables: torch.Tensor  # [S, max_blocks] int32, padded
    first_blocks: torch.Tensor  # [S] int32, place in its sequence of each table's first block
    # Where each token's K and V go. The cache is strided by blocks, so a slot is two numbers.
    slot_blocks: torch.Tensor  # [T] int64, block of the pool
    slot_offsets: torch.Tensor  # [T] int64, place in it
    extents: tuple[tuple[int, int], ...]  # [S] (seq_len, query_len), for loops on the host


class AttentionBackend(Protocol):
    """Writes this step's K and V to their slots, then attends through the block tables."""

    name: str
    block_size_multiple: int  # block sizes it takes are multiples of this

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
        """Causal attention, aligned bottom right: the last query sees all keys.

        query [T, Hq, K], key [T, H, K], value [T, H, V], Hq a multiple of H; returns [T, Hq, V],
        contiguous. A query sees the `window` last tokens, itself included, or those from the last
        multiple of `chunk` on, 0: all. Scores become softcap * tanh(scores / softcap) unless
        softcap is 0. `sinks` [Hq] is one more score for every query of a head, neither scaled nor
        capped, of a token whose value is 0.
        """
        ...


def build_metadata(
    batch: Batch, *, block_size: int, device: torch.device
) -> tuple[AttentionMetadata, ...]:
    """One entry per cache group of the batch."""
    num_sequences = len(batch.sequence_ids)
    query_lens = batch.query_lens.to(torch.int64)
    starts = torch.zeros(num_sequences + 1, dtype=torch.int32)
    starts[1:] = query_lens.cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(num_sequences), query_lens)  # [T]
    positions = batch.positions.to(torch.int64)
    extents = tuple(zip(batch.seq_lens.tolist(), batch.query_lens.tolist(), strict=True))
    seq_lens, fed, query_starts = (
        tensor.to(device) for tensor in (batch.seq_lens, batch.query_lens, starts)
    )
    places = positions // block_size
    offsets = (positions % block_size).to(device)
    return tuple(
        AttentionMetadata(
            seq_lens=seq_lens,
            query_lens=fed,
            query_starts=query_starts,
            block_tables=tables.block_ids.to(device),
            first_blocks=tables.first_blocks.to(device),
            slot_blocks=_slot_blocks(tables, sequence, places).to(device),
            slot_offsets=offsets,
            extents=extents,
        )
        for tables in batch.block_tables
    )


def _slot_blocks(tables: BlockTables, sequence: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[T]; `places` are those of the tokens' blocks in their sequences."""
    return tables.block_ids[sequence, places - tables.first_blocks[sequence]].to(torch.int64)
