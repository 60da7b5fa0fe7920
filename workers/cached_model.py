"""A rank's model with its KV cache: the forward passes of steps."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from workers import kv_cache
from workers.attention.base import TABLE_MULTIPLE, AttentionBackend, StepInputs, build_inputs
from workers.batch import Batch
from workers.config import CacheLayout, LayerCacheSpec
from workers.cuda_graphs import DecodeGraphs, Graph, OnProgress, Resolve
from workers.errors import CacheError, StepError
from workers.layers.paged_attention import StepPass
from workers.model_part import ModelPart
from workers.staging import Staging

logger = logging.getLogger(__name__)

MakeGraph = Callable[[], Graph]  # for graphs of one capture, which share memory


class CachedModel:
    """Has no cache until `allocate`. With graphs, decode steps of few enough rows are replayed."""

    def __init__(
        self,
        model: ModelPart,
        backend: AttentionBackend,
        *,
        cache_dtype: torch.dtype,
        device: torch.device,
        make_graphs: Callable[[], MakeGraph] | None,
        max_graph_rows: int,
    ) -> None:
        """Without `make_graphs` every step is launched kernel by kernel."""
        self._model = model
        self._backend = backend
        self._cache_dtype = cache_dtype
        self._device = device
        self._make_graphs = make_graphs
        self._max_graph_rows = max_graph_rows
        self._staging = Staging(device)
        self._graphs: DecodeGraphs | None = None
        self.release()

    @property
    def block_size_multiple(self) -> int:
        """Block sizes are multiples of it."""
        return self._backend.block_size_multiple

    @property
    def layers(self) -> tuple[LayerCacheSpec, ...]:
        """What each attention call keeps."""
        return tuple(
            LayerCacheSpec(
                window=shape.window,
                chunk=shape.chunk,
                num_kv_heads=shape.num_kv_heads,
                k_dim=shape.k_dim,
                v_dim=shape.v_dim,
                element_bytes=self._cache_dtype.itemsize,
            )
            for shape in (call.shape for call in self._model.calls)
        )

    @property
    def layout(self) -> CacheLayout:
        """Raises StepError: there is no cache."""
        if self._layout is None:
            raise StepError("the KV cache isn't allocated: AllocateCache comes before Execute")
        return self._layout

    def release(self) -> None:
        """Gives the cache and the graphs back."""
        self._graphs = None
        self._layout: CacheLayout | None = None
        self._caches: tuple[kv_cache.LayerCache, ...] = ()  # by attention call
        self._group_of: tuple[int, ...] = ()  # the cache group of each attention call

    def allocate(self, layout: CacheLayout, *, available_bytes: int) -> int:
        """Makes the KV cache and returns its bytes; `capture` follows where there are graphs.

        Raises CacheError: it doesn't fit the memory, the model or the attention backend.
        """
        multiple = self.block_size_multiple
        if layout.block_size % multiple:
            raise CacheError(
                f"block_size={layout.block_size} must be a multiple of {multiple} "
                f"for attention backend {self._backend.name}"
            )
        self.release()
        # Padded rows of graphs write to a block of their own, behind those that the driver knows.
        num_blocks = layout.num_blocks + (self._make_graphs is not None)
        self._caches, cache_bytes = kv_cache.allocate(
            self.layers,
            replace(layout, num_blocks=num_blocks),
            dtype=self._cache_dtype,
            device=self._device,
            available_bytes=available_bytes,
        )
        self._layout = layout
        group_of = {layer: group for group, layers in enumerate(layout.groups) for layer in layers}
        self._group_of = tuple(group_of[layer] for layer in range(len(self._model.calls)))
        return cache_bytes

    def capture(self, on_progress: OnProgress, *, most: int | None = None) -> int:
        """Captures the graphs on this cache, or `most` of them; returns how many there are."""
        if self._make_graphs is None:
            return 0
        layout = self.layout
        max_len = self._model.max_model_len
        graphs = DecodeGraphs(
            self._forward,
            self._make_graphs(),
            max_rows=self._max_graph_rows,
            max_total_len=max_len,
            block_size=layout.block_size,
            table_widths=[self._table_width(max_len, layout.block_size)] * len(layout.groups),
            scratch_block=layout.num_blocks,
            staging=self._staging,
            device=self._device,
        )
        graphs.capture(on_progress, most=most)
        self._graphs = graphs
        return graphs.num_graphs

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None

    @torch.inference_mode()
    def run(self, batch: Batch, resolve: Resolve) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies blocks, then runs the forward pass on what `resolve` makes of the batch's ids.

        The ids that were fed [T] int32, and this rank's logits of the wanted rows, which are there
        until the next step.
        """
        layout = self.layout
        if len(batch.block_copies):
            kv_cache.copy_blocks(self._caches, batch.block_copies)
        if self._graphs is not None and self._graphs.covers(batch):
            return self._graphs.run(batch, resolve)
        inputs = build_inputs(batch, block_size=layout.block_size, staging=self._staging)
        inputs = replace(inputs, input_ids=resolve(inputs.input_ids))
        return inputs.input_ids, self._forward(inputs)

    @staticmethod
    def _table_width(max_len: int, block_size: int) -> int:
        blocks = -(-max_len // block_size)
        return -(-blocks // TABLE_MULTIPLE) * TABLE_MULTIPLE

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        step = StepPass(
            self._model.calls,
            self._caches,
            [inputs.groups[group] for group in self._group_of],
            self._backend,
        )
        logits = self._model.forward(inputs.input_ids, inputs.positions, inputs.wanted, step)
        step.finish()
        return logits
