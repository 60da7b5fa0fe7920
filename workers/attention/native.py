"""Attention on a CPU by a kernel of ours in C, which reads K and V through the block tables."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.attention.base import AttentionMetadata, AttentionShape, UnsuitedError
from workers.kv_cache import LayerCache
from workers.native.build import NoCompilerError
from workers.native.calls import load_kernels

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

CHANGING = ("query", "key", "value", "key_cache", "value_cache", "output", "sinks")
# Tensors of the metadata.
OF_STEP = (
    *("seq_lens", "query_starts", "block_tables", "first_blocks"),
    *("slot_blocks", "slot_offsets"),
)
STRIDES = (
    *("query_token", "query_head", "key_token", "key_head", "value_token", "value_head"),
    *("key_block", "key_slot", "key_cache_head", "value_block", "value_slot", "value_cache_head"),
)
COUNTS = (
    *("num_heads", "num_kv_heads", "k_dim", "v_dim", "block_size"),
    *("num_items", "tile_queries", "window", "chunk", "num_threads"),
)


class _Arguments(ctypes.Structure):
    """As in attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*CHANGING, *OF_STEP, "items")),
        *((name, ctypes.c_int64) for name in (*STRIDES, "table_stride")),
        *((name, ctypes.c_int32) for name in COUNTS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("workspaces", ctypes.c_void_p),
    )


# Shapes of query, value and the cached keys; window; chunk.
Kind = tuple[torch.Size, torch.Size, torch.Size, int, int]


@dataclass(slots=True)
class _Step:
    """What the kernel is told of a step's calls of one kind, and what must live for it."""

    metadata: AttentionMetadata
    kind: Kind
    items: torch.Tensor
    arguments: _Arguments
    reference: object  # to the arguments
    strides: tuple[int, ...] = ()


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
        library = load_kernels("attention", DEFINITIONS[dtype])
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
        self._attend.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._attend.restype = None
        for size in (library.workspace_bytes, library.arguments_bytes):
            size.restype = ctypes.c_int64
        assert library.arguments_bytes() == ctypes.sizeof(_Arguments), "as in attention.c"
        self._workspace_bytes: int = library.workspace_bytes()
        self._workspaces = torch.empty(0, dtype=torch.uint8)
        self._items: tuple[torch.Tensor, int, torch.Tensor] | None = None
        self._step: _Step | None = None

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
        dtype, wanted = cache.key.dtype, query.dtype
        query, key, value = (_dense(each.to(dtype)) for each in (query, key, value))
        output = query.new_empty(*query.shape[:2], value.shape[2])
        sinks = None if sinks is None else sinks.float().contiguous()
        step = self._step
        kind = (query.shape, value.shape, cache.key.shape, window, chunk)
        if step is None or step.metadata is not metadata or step.kind != kind:
            step = self._step = self._begin(kind, metadata)
        arguments = step.arguments
        for name, tensor in zip(
            CHANGING, (query, key, value, cache.key, cache.value, output, sinks), strict=True
        ):
            setattr(arguments, name, None if tensor is None else tensor.data_ptr())
        strides = (
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
        )
        if strides != step.strides:
            step.strides = strides
            for name, stride in zip(STRIDES, strides, strict=True):
                setattr(arguments, name, stride)
        arguments.scale, arguments.softcap = scale, softcap
        arguments.num_threads = torch.get_num_threads()
        arguments.workspaces = self._room(arguments.num_threads)
        self._attend(step.reference, len(query))
        return output.to(wanted)

    def _begin(self, kind: "Kind", metadata: AttentionMetadata) -> "_Step":
        """What calls of one kind have in common in a step."""
        (_, num_heads, k_dim), (_, num_kv_heads, v_dim), cache_shape, window, chunk = kind
        most = max(1, MAX_ROWS // (num_heads // num_kv_heads))
        tile_queries = max(1, min(most, metadata.max_query_len))
        items = self._tiles(metadata, tile_queries)
        arguments = _Arguments(
            table_stride=metadata.block_tables.stride(0),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            block_size=cache_shape[1],
            num_items=len(items),
            tile_queries=tile_queries,
            window=window,
            chunk=chunk,
        )
        for name in OF_STEP:
            setattr(arguments, name, getattr(metadata, name).data_ptr())
        arguments.items = items.data_ptr()
        return _Step(metadata, kind, items, arguments, ctypes.byref(arguments))

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
