"""Attention on a CPU by a kernel of ours in C, which reads K and V through the block tables."""

import ctypes
from collections.abc import Sequence

import torch

from workers.attention.base import AttentionMetadata, AttentionShape, UnsuitedError
from workers.kv_cache import LayerCache
from workers.native.build import NoCompilerError, load

LANES = 16
ALIGNMENT = 64  # bytes
MAX_DIM = 512
MAX_ROWS = 48
MAX_HEADS = 128
# By dtype, what the source is compiled with.
DEFINITIONS: dict[torch.dtype, tuple[str, ...]] = {
    torch.float32: (),
    torch.bfloat16: ("BFLOAT16",),
}

POINTERS = (
    *("query", "key", "value", "key_cache", "value_cache", "output", "sinks"),
    *("seq_lens", "query_starts", "block_tables", "first_blocks"),
    *("slot_blocks", "slot_offsets", "items"),
)
STRIDES = (
    *("query_token", "query_head", "key_token", "key_head", "value_token", "value_head"),
    *("key_block", "key_slot", "key_cache_head", "value_block", "value_slot", "value_cache_head"),
    "table_stride",
)
COUNTS = (
    *("num_tokens", "num_heads", "num_kv_heads", "k_dim", "v_dim", "block_size"),
    *("num_items", "tile_queries", "window", "chunk", "num_threads"),
)


class _Arguments(ctypes.Structure):
    """As in attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in STRIDES),
        *((name, ctypes.c_int32) for name in COUNTS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("workspaces", ctypes.c_void_p),
    )


def make(
    shapes: Sequence[AttentionShape],
    dtype: torch.dtype,
    device: torch.device,
    *,
    deterministic: bool = False,
) -> "NativeAttention":
    """Raises UnsuitedError: the kernel takes no such numbers or shape, or can't be compiled."""
    if device.type != "cpu":
        raise UnsuitedError(f"it computes on the CPU, and this is {device.type}")
    if dtype not in DEFINITIONS:
        raise UnsuitedError(f"it takes float32 and bfloat16, not {dtype}")
    for shape in shapes:
        for dim in (shape.k_dim, shape.v_dim):
            if dim % LANES or dim > MAX_DIM:
                raise UnsuitedError(
                    f"head dim {dim} is no multiple of {LANES} that is at most {MAX_DIM}"
                )
        if shape.num_heads // shape.num_kv_heads > MAX_HEADS:
            raise UnsuitedError(f"more than {MAX_HEADS} query heads share a KV head")
    try:
        library = load("attention", DEFINITIONS[dtype])
    except NoCompilerError as error:
        raise UnsuitedError(str(error)) from error
    if not library.has_vectors():
        raise UnsuitedError(
            "this processor has neither AVX-512 nor AVX2 with FMA: torch is faster there"
        )
    return NativeAttention(library, deterministic=deterministic)


class NativeAttention:
    """Threads are those of torch.

    A query's keys are added up in groups that begin at fixed places of its sequence, whatever else
    is in the step, unless a block is less than a group: then a table may begin within one.
    """

    name = "native"
    takes_fp8_cache = False
    is_capturable = False

    def __init__(self, library: ctypes.CDLL, *, deterministic: bool) -> None:
        self.block_size_multiple = LANES if deterministic else 1
        self._attend = library.attend
        self._attend.restype = None
        for size in (library.workspace_bytes, library.arguments_bytes):
            size.restype = ctypes.c_int64
        assert library.arguments_bytes() == ctypes.sizeof(_Arguments), "as in attention.c"
        self._workspace_bytes: int = library.workspace_bytes()
        self._workspaces = torch.empty(0, dtype=torch.uint8)
        self._items: tuple[torch.Tensor, int, torch.Tensor] | None = None

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
        num_tokens, num_heads, k_dim = query.shape
        num_kv_heads, v_dim = value.shape[1:]
        dtype, wanted = cache.key.dtype, query.dtype
        query, key, value = (_dense(each.to(dtype)) for each in (query, key, value))
        output = query.new_empty(num_tokens, num_heads, v_dim)
        num_threads = torch.get_num_threads()
        sinks = None if sinks is None else sinks.float().contiguous()
        tile_queries = max(1, MAX_ROWS // (num_heads // num_kv_heads))
        items = self._tiles(metadata, tile_queries)
        tensors = (
            *(query, key, value, cache.key, cache.value, output, sinks),
            *(metadata.seq_lens, metadata.query_starts, metadata.block_tables),
            *(metadata.first_blocks, metadata.slot_blocks, metadata.slot_offsets, items),
        )
        self._attend(
            ctypes.byref(
                _Arguments(
                    *(None if each is None else each.data_ptr() for each in tensors),
                    *query.stride()[:2],
                    *key.stride()[:2],
                    *value.stride()[:2],
                    *cache.key.stride()[:3],
                    *cache.value.stride()[:3],
                    metadata.block_tables.stride(0),
                    *(num_tokens, num_heads, num_kv_heads, k_dim, v_dim, cache.key.shape[1]),
                    *(len(items), tile_queries, window, chunk, num_threads),
                    scale,
                    softcap,
                    self._room(num_threads),
                )
            )
        )
        return output.to(wanted)

    def _room(self, num_threads: int) -> int:
        """Address of a workspace for each thread; their stacks may be too small."""
        wanted = num_threads * self._workspace_bytes + ALIGNMENT
        if len(self._workspaces) < wanted:
            self._workspaces = torch.empty(wanted, dtype=torch.uint8)
        return -(-self._workspaces.data_ptr() // ALIGNMENT) * ALIGNMENT

    def _tiles(self, metadata: AttentionMetadata, tile_queries: int) -> torch.Tensor:
        """[I, 2] int32: sequence and first query of each tile; the same for layers of one kind."""
        if self._items is not None:
            known, size, items = self._items
            if known is metadata.query_lens and size == tile_queries:
                return items
        counts = -(-metadata.query_lens // tile_queries)
        sequences = torch.repeat_interleave(counts)
        firsts = counts.cumsum(0) - counts
        tiles = torch.arange(len(sequences)) - firsts[sequences]
        # The last tiles of a prompt see most keys: they are begun first.
        items = torch.stack((sequences, tiles * tile_queries), dim=1).int().flip(0).contiguous()
        self._items = metadata.query_lens, tile_queries, items
        return items


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """With a head's numbers side by side."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
