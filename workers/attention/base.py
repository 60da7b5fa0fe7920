"""What attention backends take, and the step's metadata that they share."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from workers.batch import Batch, BlockTables
from workers.kv_cache import LayerCache
from workers.staging import Staging

# On a device rows of block tables are as long: Triton compiles a kernel for strides that are
# multiples of it, and another for those that aren't.
TABLE_MULTIPLE = 16
IntArray = NDArray[np.integer[Any]]


class UnsuitedError(Exception):
    """A backend can't serve the model on this device; says why in half a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What one attention call of the model asks for, on this rank, whatever the step."""

    num_heads: int
    num_kv_heads: int
    k_dim: int  # of queries too
    v_dim: int
    scale: float
    window: int = 0  # tokens a query sees, itself included; 0: all before it
    chunk: int = 0  # a query sees tokens from the last multiple of it on; 0: all before it
    softcap: float = 0.0  # 0: none
    has_sinks: bool = False


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
    host_lens: torch.Tensor  # [S, 2] int32 on the host: seq_lens and query_lens
    # At least the largest of query_lens, and of seq_lens + query_lens. A kernel that runs from a
    # CUDA graph was launched for these, whatever the step brings.
    max_query_len: int
    max_total_len: int

    @property
    def extents(self) -> list[list[int]]:
        """(seq_len, query_len) of each sequence, for loops on the host."""
        lens: list[list[int]] = self.host_lens.tolist()
        return lens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """What a forward pass reads, on the device."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32
    wanted: torch.Tensor  # [R + P] int32, rows of T that get logits: sampled, then scored
    groups: tuple[AttentionMetadata, ...]  # one per cache group


class AttentionBackend(Protocol):
    """Writes this step's K and V to their slots, then attends through the block tables."""

    name: str
    block_size_multiple: int  # block sizes it takes are multiples of this
    takes_fp8_cache: bool
    is_capturable: bool  # as part of a CUDA graph: it reads no device memory on the host

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


def build_inputs(batch: Batch, *, block_size: int, staging: Staging) -> StepInputs:
    """Goes to the device in one copy, whatever the number of sequences and groups.

    Computed by numpy: torch's small operations cost more, and each lets other threads have the
    interpreter.
    """
    seq_lens, query_lens = batch.seq_lens.numpy(), batch.query_lens.numpy()
    starts = np.zeros(len(query_lens) + 1, np.int32)
    np.cumsum(query_lens, out=starts[1:])
    sequence = np.repeat(np.arange(len(query_lens)), query_lens)  # [T]
    places, offsets = np.divmod(batch.positions.numpy(), np.int32(block_size))
    host = [
        batch.input_ids,
        batch.positions,
        torch.cat((batch.sample_index, batch.score_index)),
        batch.seq_lens,
        batch.query_lens,
        torch.from_numpy(starts),
        torch.from_numpy(offsets),
    ]
    for tables in batch.block_tables:
        block_ids = tables.block_ids
        if staging.is_device:
            block_ids = widen(block_ids)
        host += [block_ids, tables.first_blocks, _slot_blocks(tables, sequence, places)]
    input_ids, positions, wanted, lens, fed, query_starts, slots, *rest = staging.move(host)
    slot_offsets = slots.to(torch.int64)
    host_lens = torch.from_numpy(np.stack((seq_lens, query_lens), axis=1))
    max_query_len = int(query_lens.max(initial=0))
    max_total_len = int((seq_lens + query_lens).max(initial=0))
    groups = tuple(
        AttentionMetadata(
            seq_lens=lens,
            query_lens=fed,
            query_starts=query_starts,
            block_tables=block_ids,
            first_blocks=first_blocks,
            slot_blocks=slot_blocks.to(torch.int64),
            slot_offsets=slot_offsets,
            host_lens=host_lens,
            max_query_len=max_query_len,
            max_total_len=max_total_len,
        )
        for block_ids, first_blocks, slot_blocks in zip(*[iter(rest)] * 3, strict=True)
    )
    return StepInputs(input_ids=input_ids, positions=positions, wanted=wanted, groups=groups)


def widen(block_ids: torch.Tensor) -> torch.Tensor:
    """Block tables [S, W] with W a multiple of TABLE_MULTIPLE; what is added is read by nobody."""
    return torch.nn.functional.pad(block_ids, (0, -block_ids.shape[1] % TABLE_MULTIPLE))


def _slot_blocks(tables: BlockTables, sequence: IntArray, places: IntArray) -> torch.Tensor:
    """[T] int32; `places` are those of the tokens' blocks in their sequences."""
    columns = places - tables.first_blocks.numpy()[sequence]
    return torch.from_numpy(tables.block_ids.numpy()[sequence, columns])
