"""Attention by our own Triton kernels: any step, shape, mask and block size in one launch or two.

Nothing here reads a tensor of the device or the host's lengths, so that launches can be captured
in a CUDA graph; only bounds decide what is launched. Rows of T that no sequence has are left as
they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton import next_power_of_2
from triton.runtime import JITFunction

from workers.attention import triton_kernels as kernels
from workers.attention.base import AttentionMetadata, AttentionShape, UnsuitedError
from workers.attention.cache_writes import write_kv
from workers.kv_cache import LayerCache

LOG2_E = 1.4426950408889634
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 512
MIN_PAD = 16  # the least that tl.dot takes
MAX_QUERY_TILE_BYTES = 1 << 15  # of one token's query heads of a KV head
# A split of fewer keys costs more to add up than it saves.
MIN_SPLIT_KEYS = 256
MAX_SPLITS = 32
# What the interpreter counts as a device.
INTERPRETED_PROCESSORS = 16


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a kernel is cut; by what fits in 100 KB of shared memory, not tuned on a device."""

    rows: int  # where a sequence may have more than one query
    keys: int
    num_warps: int
    num_stages: int


# By bytes of a head, the wider of K and V.
TILINGS = {
    256: Tiling(128, 64, 8, 2),
    512: Tiling(64, 32, 8, 2),
    1024: Tiling(32, 32, 8, 1),
    2048: Tiling(16, 16, 4, 1),
}
MIN_HEAD_BYTES = min(TILINGS)
SPLIT_WARPS = 4


def make(
    shapes: Sequence[AttentionShape],
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> "TritonAttention":
    """Raises UnsuitedError: the kernels can't run there, or take no such shape."""
    is_interpreted = not isinstance(kernels.attend_tiles, JITFunction)
    if device.type != "cuda" and not is_interpreted:
        raise UnsuitedError(f"it needs a CUDA device, and this is {device.type}")
    if device.type == "cuda" and is_interpreted:
        raise UnsuitedError("TRITON_INTERPRET=1 is for devices without kernels: unset it")
    if dtype not in DTYPES:
        raise UnsuitedError(f"it takes float32, float16 and bfloat16, not {dtype}")
    if is_interpreted and dtype is torch.bfloat16:
        raise UnsuitedError("triton's interpreter can't multiply bfloat16: use float32 or float16")
    for shape in shapes:
        _check_shape(shape, dtype)
    if device.type == "cuda":
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        num_processors = INTERPRETED_PROCESSORS
    return TritonAttention(num_processors=num_processors, deterministic=deterministic)


def _check_shape(shape: AttentionShape, dtype: torch.dtype) -> None:
    dim = max(shape.k_dim, shape.v_dim)
    if dim > MAX_DIM:
        raise UnsuitedError(f"a head of {dim} numbers is more than {MAX_DIM}")
    group = shape.num_heads // shape.num_kv_heads
    tile_bytes = _pad(group) * _pad(dim) * dtype.itemsize
    if tile_bytes > MAX_QUERY_TILE_BYTES:
        raise UnsuitedError(
            f"{group} query heads of {dim} numbers for one KV head take {tile_bytes} bytes, more "
            f"than {MAX_QUERY_TILE_BYTES}"
        )


class TritonAttention:
    """Writes K and V, then attends: two launches, or three where a decode step is split."""

    name = "triton"
    takes_fp8_cache = False
    is_capturable = True
    block_size_multiple = 1  # each key is found by itself

    def __init__(self, *, num_processors: int, deterministic: bool = False) -> None:
        """`num_processors` are the device's multiprocessors.

        `deterministic`: the bits of a row depend on its sequence alone, not on what else is in
        the step nor on how many tokens are fed at once. One kernel with one tiling does all, so
        that decoding is slower.
        """
        self._num_processors = num_processors
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
        num_kv_heads, k_dim = cache.key.shape[2:]
        v_dim = cache.value.shape[3]
        output = query.new_empty(len(query), query.shape[1], v_dim)
        tiling = TILINGS[max(MIN_HEAD_BYTES, _pad(max(k_dim, v_dim)) * cache.key.itemsize)]
        group = query.shape[1] // num_kv_heads
        splits = self._num_splits(metadata, num_kv_heads, chunk or window)
        is_decoding = metadata.max_query_len == 1 and not self._deterministic
        traits = kernels.Traits(
            group=group,
            k_dim=k_dim,
            v_dim=v_dim,
            k_pad=_pad(k_dim),
            v_pad=_pad(v_dim),
            window=window,
            chunk=chunk,
            softcap=softcap * LOG2_E,
            block_size=cache.key.shape[1],
            tile_rows=_pad(group) if is_decoding else max(_pad(group), tiling.rows),
            tile_keys=tiling.keys,
        )
        call = _Call(
            query=query,
            sinks=None if sinks is None else sinks.contiguous(),
            cache=cache,
            metadata=metadata,
            # What is capped is multiplied by the cap after that, and by log2(e) with it.
            scale=scale / softcap if softcap else scale * LOG2_E,
            traits=traits,
            tiling=tiling,
        )
        if splits == 1:
            call.run_tiles(output)
        else:
            call.run_splits(output, splits)
        return output

    def _num_splits(self, metadata: AttentionMetadata, num_kv_heads: int, reach: int) -> int:
        """Into how many parts the keys of a decode step are cut; by bounds, not by lengths."""
        if self._deterministic or metadata.max_query_len > 1:
            return 1
        num_keys = min(metadata.max_total_len, reach or metadata.max_total_len)
        num_programs = len(metadata.seq_lens) * num_kv_heads
        wanted = 2 * self._num_processors // num_programs
        return max(1, min(wanted, num_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of `attend`, K and V being written."""

    query: torch.Tensor  # [T, Hq, K]
    sinks: torch.Tensor | None  # [Hq]
    cache: LayerCache
    metadata: AttentionMetadata
    scale: float
    traits: kernels.Traits
    tiling: Tiling

    def run_tiles(self, output: torch.Tensor) -> None:
        """Output [T, Hq, V]."""
        num_sequences = len(self.metadata.seq_lens)
        # A sequence begins a tile of its own; this many there may be at most.
        num_tiles = len(self.query) // (self.traits.tile_rows // self.traits.group) + num_sequences
        kernels.attend_tiles[(num_tiles, self.cache.key.shape[2])](
            output,
            self.query,
            self.query.stride(),
            self.sinks,
            _as_tuple(self.cache),
            self._step(),
            num_sequences,
            self.scale,
            self.traits,
            num_warps=self.tiling.num_warps,
            num_stages=self.tiling.num_stages,
            enable_fp_fusion=True,
        )

    def run_splits(self, output: torch.Tensor, num_splits: int) -> None:
        """Output [T, Hq, V], of a step of at most one query a sequence."""
        num_sequences, num_heads = len(self.metadata.seq_lens), self.query.shape[1]
        v_dim = self.traits.v_dim
        tops = self.query.new_empty(num_sequences, num_heads, num_splits, dtype=torch.float32)
        partial = self.query.new_empty(*tops.shape, v_dim, dtype=torch.float32)
        kernels.attend_splits[(num_sequences, self.cache.key.shape[2], num_splits)](
            partial,
            tops,
            self.query,
            self.query.stride(),
            _as_tuple(self.cache),
            self._step(),
            num_splits,
            self.scale,
            self.traits,
            num_warps=SPLIT_WARPS,
            num_stages=self.tiling.num_stages,
            enable_fp_fusion=True,
        )
        kernels.combine_splits[(num_sequences, num_heads)](
            output,
            partial,
            tops,
            self.sinks,
            self.metadata.query_starts,
            num_splits,
            v_dim,
            self.traits.v_pad,
            next_power_of_2(num_splits),
            num_warps=SPLIT_WARPS,
            enable_fp_fusion=True,
        )

    def _step(self) -> kernels.Step:
        return kernels.Step(
            self.metadata.seq_lens,
            self.metadata.query_starts,
            self.metadata.first_blocks,
            self.metadata.block_tables,
            self.metadata.block_tables.stride(0),
        )


def _as_tuple(cache: LayerCache) -> kernels.Cache:
    return kernels.Cache(cache.key, cache.value, cache.key.stride(), cache.value.stride())


def _pad(number: int) -> int:
    """A side of a matrix that tl.dot takes."""
    padded: int = next_power_of_2(number)
    return max(MIN_PAD, padded)
