"""One attention call of a step over sequences of given lengths, for any backend.

What no query sees is NaN in the cache, tables name blocks in random order, and other sequences'
blocks lie between.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tests.tiny_models import Row, make_batch
from workers.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
    build_inputs,
)
from workers.config import CacheLayout, LayerCacheSpec
from workers.kv_cache import LayerCache, allocate
from workers.staging import Staging

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is attended, and to what."""

    lengths: Sequence[tuple[int, int]]  # (seq_len, query_len) of each sequence
    num_kv_heads: int = 2
    group: int = 2
    k_dim: int = 64
    v_dim: int = 64
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    block_size: int = 16
    drops_blocks: bool = False  # tables begin at the first block that is seen
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            num_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            scale=self.k_dim**-0.5,
            window=self.window,
            chunk=self.chunk,
            softcap=self.softcap,
            has_sinks=self.has_sinks,
        )

    def first_seen(self, position: int) -> int:
        if self.chunk:
            return position - position % self.chunk
        return max(0, position - self.window + 1) if self.window else 0


class PagedStep:
    """A step's tensors. Query, key and value [T, heads, dim] are strided as a model brings them."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self._random = torch.Generator().manual_seed(step.seed)
        ends = [sum(each) for each in step.lengths]
        counts = [-(-end // step.block_size) for end in ends]
        blocks = torch.randperm(sum(counts) + 3, generator=self._random)
        self.tables = [part.tolist() for part in blocks[3:].split(counts)]
        self.cache = self._make_cache(len(blocks))
        num_rows = sum(query_len for _, query_len in step.lengths)
        heads = step.num_kv_heads
        self.query = self._draw(heads * step.group, num_rows, step.k_dim).transpose(0, 1)
        self.key = self._draw(heads, num_rows, step.k_dim).transpose(0, 1)
        self.value = self._draw(heads, num_rows, step.v_dim).transpose(0, 1)
        self.sinks = self._draw(heads * step.group) if step.has_sinks else None
        self.metadata = self.metadata_of(range(len(ends)))

    def metadata_of(self, sequences: Sequence[int]) -> AttentionMetadata:
        step = self.step
        rows = []
        for number in sequences:
            seq_len, query_len = step.lengths[number]
            dropped = step.first_seen(seq_len) // step.block_size if step.drops_blocks else 0
            row = Row(
                sequence_id=number,
                tokens=[0] * query_len,
                seq_len=seq_len,
                block_tables=[self.tables[number][dropped:]],
                first_blocks=[dropped],
                sample=(),
            )
            rows.append(row)
        batch = make_batch(rows)
        (found,) = build_inputs(batch, block_size=step.block_size, staging=Staging(CPU)).groups
        return found

    def without_empty(self) -> AttentionMetadata:
        """The same rows, without the sequences that have none."""
        return self.metadata_of([i for i, (_, fed) in enumerate(self.step.lengths) if fed])

    def attend(
        self, backend: AttentionBackend, metadata: AttentionMetadata | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the pool after it; the step's own pool stays as it is."""
        pool = self.cache.pool.clone()
        cache = LayerCache(
            *(self._view(pool, part) for part in (self.cache.key, self.cache.value)), pool
        )
        shape = self.step.shape
        output = backend.attend(
            self.query,
            self.key,
            self.value,
            cache,
            metadata or self.metadata,
            scale=shape.scale,
            window=shape.window,
            chunk=shape.chunk,
            softcap=shape.softcap,
            sinks=self.sinks,
        )
        assert output.is_contiguous()
        return output, pool

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random).to(self.step.dtype)

    def _view(self, pool: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        return pool.as_strided(part.shape, part.stride(), part.storage_offset())

    def _make_cache(self, num_blocks: int) -> LayerCache:
        """The second of two layers in a pool; tokens that were fed before are in it."""
        step = self.step
        layer = LayerCacheSpec(
            window=0,
            num_kv_heads=step.num_kv_heads,
            k_dim=step.k_dim,
            v_dim=step.v_dim,
            element_bytes=step.dtype.itemsize,
        )
        layout = CacheLayout(block_size=step.block_size, num_blocks=num_blocks, groups=((0, 1),))
        (_, cache), _ = allocate(
            [layer, layer], layout, dtype=step.dtype, device=CPU, available_bytes=1 << 30
        )
        cache.pool.fill_(float("nan"))
        for table, (seq_len, _) in zip(self.tables, step.lengths, strict=True):
            places = torch.arange(step.first_seen(seq_len), seq_len)
            blocks = torch.tensor(table, dtype=torch.int64)[places // step.block_size]
            slots = blocks, places % step.block_size
            cache.key[slots] = self._draw(len(places), step.num_kv_heads, step.k_dim)
            cache.value[slots] = self._draw(len(places), step.num_kv_heads, step.v_dim)
        return cache


def feed_in_pieces(
    step: Step, pieces: Sequence[int], backend: AttentionBackend, *, mates: Sequence[int] = ()
) -> torch.Tensor:
    """Outputs [sum(pieces), Hq, V] of one sequence that is fed piece by piece.

    Others feed `mates` tokens each in every step.
    """
    whole = PagedStep(replace(step, lengths=[(0, sum(pieces))]))
    found = []
    start = 0
    for length in pieces:
        lengths = [*((5, fed) for fed in mates), (start, length)]
        paged = PagedStep(replace(step, lengths=lengths, seed=start + 1))
        rows = slice(start, start + length)
        for part, of_whole in (
            (paged.query, whole.query),
            (paged.key, whole.key),
            (paged.value, whole.value),
        ):
            part[sum(mates) :] = of_whole[rows]
        paged.sinks = whole.sinks
        _fill(paged, whole, start)
        found.append(paged.attend(backend)[0][sum(mates) :])
        start += length
    return torch.cat(found)


def _fill(paged: PagedStep, whole: PagedStep, end: int) -> None:
    """The last sequence's cache holds what `whole` fed of it before."""
    places = torch.arange(paged.step.first_seen(end), end)
    blocks = torch.tensor(paged.tables[-1], dtype=torch.int64)[places // paged.step.block_size]
    slots = blocks, places % paged.step.block_size
    paged.cache.key[slots] = whole.key[places]
    paged.cache.value[slots] = whole.value[places]
