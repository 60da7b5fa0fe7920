"""One attention call of a step, for kernels that read keys through block tables."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from workers.attention.base import AttentionMetadata
from workers.kv_cache import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCall:
    """What AttentionBackend.attend got, after this step's K and V were written.

    Nothing here reads the device from the host: a step may be captured as a CUDA graph.
    """

    query: torch.Tensor  # [T, Hq, K]
    cache: LayerCache
    metadata: AttentionMetadata
    scale: float
    window: int
    softcap: float
    sinks: torch.Tensor | None  # [Hq]
    deterministic: bool

    def key_lens(self) -> torch.Tensor:
        """[S] int32, tokens in the blocks of each table.

        Masks are aligned bottom right, so that leaving out the same number of keys in front moves
        neither causality nor windows.
        """
        metadata = self.metadata
        total_lens = metadata.seq_lens + metadata.query_lens
        block_size = self.cache.key.shape[1]
        return torch.sub(total_lens, metadata.first_blocks, alpha=block_size)


def sums(lens: torch.Tensor) -> torch.Tensor:
    """[S] int32 -> [S + 1] int32: of those before each sequence, and of all."""
    return functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
