"""Attention on a CPU by a kernel of ours in C, which reads K and V through the block tables."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.attention.base import AttentionMetadata, AttentionShape, UnsuitedError
from workers.kv_cache import LayerCache
from workers.native.build import NoCompilerError
from workers.native.calls import Call, address_of, load_kernels

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
    *("window", "chunk", "num_threads"),
)


class _StepArguments(ctypes.Structure):
    """As in attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*OF_STEP, "items")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_items", "tile_queries")),
    )


class _Arguments(ctypes.Structure):
    """As in attention.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("step", "query", "key", "value")),
        *((name, ctypes.c_void_p) for name in ("key_cache", "value_cache", "output")),
        *((name, ctypes.c_void_p) for name in ("sinks", "workspaces")),
        *((name, ctypes.c_int64) for name in STRIDES),
        *((name, ctypes.c_int32) for name in COUNTS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


@dataclass(slots=True)
class Step:
    """What the kernel is told of a step for layers of one kind, and what must live for it."""

    metadata: AttentionMetadata
    items: torch.Tensor
    arguments: _StepArguments
    address: int


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
        for size in (library.workspace_bytes, library.arguments_bytes, library.step_bytes):
            size.restype = ctypes.c_int64
        assert library.arguments_bytes() == ctypes.sizeof(_Arguments), "as in attention.c"
        assert library.step_bytes() == ctypes.sizeof(_StepArguments), "as in attention.c"
        self._kernel = address_of(library.attend)
        self._attend = library.attend
        self._attend.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._attend.restype = None
        self._workspace_bytes: int = library.workspace_bytes()
        self._workspaces: dict[int, torch.Tensor] = {}  # by number of threads
        self._items: tuple[torch.Tensor, int, torch.Tensor] | None = None
        # By window, chunk, query heads of a KV head and the id of the metadata, of one step.
        self._steps: dict[tuple[int, int, int, int], Step] = {}
        self._query_lens: torch.Tensor | None = None  # that step's

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
        shape = AttentionShape(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            k_dim=query.shape[2],
            v_dim=value.shape[2],
            scale=scale,
            window=window,
            chunk=chunk,
            softcap=softcap,
        )
        arguments = self._arguments(shape, cache, [query, key, value])
        arguments.step = self.step(shape, metadata).address
        arguments.output = output.data_ptr()
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        self._attend(ctypes.byref(arguments), len(query))
        return output.to(wanted)

    def call(
        self, shape: AttentionShape, cache: LayerCache, inputs: Sequence[torch.Tensor], output: int
    ) -> Call:
        """Of query, key and value [T, heads, dim] of the cache's dtype, without sinks.

        For any T of rows as far apart. The arguments lack `step`: the address of what that returns.
        """
        arguments = self._arguments(shape, cache, inputs)
        arguments.output = output
        return Call(self._kernel, arguments)

    def step(self, shape: AttentionShape, metadata: AttentionMetadata) -> Step:
        """What calls of one kind and cache group have in common in a step."""
        if self._query_lens is not metadata.query_lens:
            self._query_lens = metadata.query_lens
            self._steps.clear()
        group = shape.num_heads // shape.num_kv_heads
        kind = shape.window, shape.chunk, group, id(metadata)
        step = self._steps.get(kind)
        if step is None:
            step = self._steps[kind] = self._begin(group, metadata)
        return step

    def _arguments(
        self, shape: AttentionShape, cache: LayerCache, inputs: Sequence[torch.Tensor]
    ) -> _Arguments:
        tensors = *inputs, cache.key, cache.value
        strides = [stride for each in inputs for stride in each.stride()[:2]]
        strides += [*cache.key.stride()[:3], *cache.value.stride()[:3]]
        num_threads = torch.get_num_threads()
        counts = (
            *(shape.num_heads, shape.num_kv_heads, shape.k_dim, shape.v_dim, cache.key.shape[1]),
            *(shape.window, shape.chunk, num_threads),
        )
        return _Arguments(
            None,
            *(each.data_ptr() for each in tensors),
            *(None, None, self._room(num_threads)),
            *strides,
            *counts,
            *(shape.scale, shape.softcap),
        )

    def _begin(self, group: int, metadata: AttentionMetadata) -> Step:
        most = max(1, MAX_ROWS // group)
        tile_queries = max(1, min(most, metadata.max_query_len))
        items = self._tiles(metadata, tile_queries)
        arguments = _StepArguments(
            *(getattr(metadata, name).data_ptr() for name in OF_STEP),
            items.data_ptr(),
            metadata.block_tables.stride(0),
            len(items),
            tile_queries,
        )
        return Step(metadata, items, arguments, ctypes.addressof(arguments))

    def _room(self, num_threads: int) -> int:
        """Address of a workspace for each thread, which stays; their stacks may be too small."""
        room = self._workspaces.get(num_threads)
        if room is None:
            room = torch.empty(num_threads * self._workspace_bytes + ALIGNMENT, dtype=torch.uint8)
            self._workspaces[num_threads] = room
        return -(-room.data_ptr() // ALIGNMENT) * ALIGNMENT

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
