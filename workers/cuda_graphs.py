"""Decode steps as CUDA graphs: the device runs a step's kernels without the host's help.

A graph is one forward pass, captured once for a number of rows (a bucket), with tensors at fixed
places. A step with fewer rows is filled up with padded ones, which write to a block that belongs to
no sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from workers.attention.base import AttentionMetadata, StepInputs, build_inputs
from workers.batch import Batch, BlockTables
from workers.staging import Staging

# The ids of a step, on the device -> the ids to feed, samples of earlier steps among them.
Resolve = Callable[[torch.Tensor], torch.Tensor]
Forward = Callable[[StepInputs], torch.Tensor]  # -> this rank's logits of the wanted rows
# Captured and in all.
OnProgress = Callable[[int, int], None]

# What the metadata of a decode step has one of for each row.
PER_ROW = (
    "seq_lens",
    "query_lens",
    "block_tables",
    "first_blocks",
    "slot_blocks",
    "slot_offsets",
)

# Steps between buckets: a padded row costs attention next to nothing, and a matrix product counts
# its rows in tiles of these.
SMALL_STEP, SMALL = 8, 64
LARGE_STEP = 16


class Graph(Protocol):
    """One captured forward pass."""

    def capture(self, run: Callable[[], None]) -> None: ...

    def replay(self) -> None: ...


class CudaGraphs:
    """Makes graphs that share memory, as one of them runs at a time. Not yet run on a device."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # The allocator keeps blocks by stream: on several the graphs would share nothing.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self) -> Graph:
        return CudaGraph(self._pool, self._stream)


class CudaGraph:
    """One of `CudaGraphs`."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool = pool
        self._stream = stream
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, run: Callable[[], None]) -> None:
        """As Graph.capture; runs it once before, for what libraries set up at their first call."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        # NCCL's own thread asks for events meanwhile, which else would end the capture.
        with torch.cuda.graph(
            self._graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            run()

    def replay(self) -> None:
        self._graph.replay()


class DecodeGraphs:
    """Graphs for all numbers of rows up to `max_rows`, by buckets."""

    def __init__(
        self,
        forward: Forward,
        make_graph: Callable[[], Graph],
        *,
        max_rows: int,
        max_total_len: int,
        block_size: int,
        table_widths: Sequence[int],
        scratch_block: int,
        staging: Staging,
        device: torch.device,
    ) -> None:
        """`table_widths` are the longest block tables of each cache group."""
        self._forward = forward
        self._make_graph = make_graph
        self._buckets = buckets(max_rows)
        self._block_size = block_size
        self._widths = table_widths
        self._scratch_block = scratch_block
        self._staging = staging
        # Of the largest bucket; the others see its first rows.
        self._static = make_padding(
            max_rows,
            table_widths,
            scratch_block=scratch_block,
            max_total_len=max_total_len,
            device=device,
        )
        self._logits: torch.Tensor | None = None  # of the largest bucket too
        self._graphs: dict[int, tuple[Graph, StepInputs]] = {}

    @property
    def num_graphs(self) -> int:
        return len(self._buckets)

    @torch.inference_mode()
    def capture(self, on_progress: OnProgress, *, most: int | None = None) -> None:
        """The largest first: the others fit into what it took. `most` of them; all where None."""
        for count, rows in enumerate(self._buckets[::-1][:most], start=1):
            inputs = first_rows(self._static, rows)
            if self._logits is None:
                # What a graph returns would be its own for good; so it writes to this.
                self._logits = torch.empty_like(self._forward(inputs))
            graph = self._make_graph()
            graph.capture(partial(self._run_into, self._logits[:rows], inputs))
            self._graphs[rows] = graph, inputs
            on_progress(count, len(self._buckets))

    def _run_into(self, logits: torch.Tensor, inputs: StepInputs) -> None:
        logits.copy_(self._forward(inputs))

    def covers(self, batch: Batch) -> bool:
        """Whether each sequence is fed one token and is sampled, and no graph is too small."""
        rows = len(batch.sequence_ids)
        return (
            0 < rows <= self._buckets[-1]
            and len(batch.input_ids) == rows == len(batch.sample_index)
            and len(batch.score_index) == 0
            and all(
                tables.block_ids.shape[1] <= width
                for tables, width in zip(batch.block_tables, self._widths, strict=True)
            )
            and batch.sample_index.equal(torch.arange(rows, dtype=torch.int32))
        )

    @torch.inference_mode()
    def run(self, batch: Batch, resolve: Resolve) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids that were fed, and logits of the rows, until the next step."""
        rows = len(batch.sequence_ids)
        bucket = next(each for each in self._buckets if each >= rows)
        assert self._logits is not None, "capture comes first"
        graph, inputs = self._graphs[bucket]
        padded = pad(batch, bucket, self._scratch_block)
        staged = build_inputs(padded, block_size=self._block_size, staging=self._staging)
        copy_into(inputs, replace(staged, input_ids=resolve(staged.input_ids)))
        graph.replay()
        # The ids may be looked at once the next step has begun.
        return inputs.input_ids[:rows].clone(), self._logits[:rows]


def buckets(max_rows: int) -> list[int]:
    """Numbers of rows for which there are graphs, rising; the last is `max_rows`."""
    sizes = [1, 2, 4, *range(SMALL_STEP, SMALL + 1, SMALL_STEP)]
    sizes += range(SMALL + LARGE_STEP, max_rows, LARGE_STEP)
    return [*(size for size in sizes if size < max_rows), max_rows]


def pad(batch: Batch, rows: int, scratch_block: int) -> Batch:
    """A decode batch with padded rows: one token each, at position 0 of the scratch block."""
    missing = rows - len(batch.sequence_ids)
    if missing == 0:
        return batch
    none = torch.zeros(missing, dtype=torch.int32)

    def longer(tables: BlockTables) -> BlockTables:
        scratch = torch.full((missing, tables.block_ids.shape[1]), scratch_block, dtype=torch.int32)
        return BlockTables(
            block_ids=torch.cat((tables.block_ids, scratch)),
            first_blocks=torch.cat((tables.first_blocks, none)),
        )

    return replace(
        batch,
        input_ids=torch.cat((batch.input_ids, none)),
        positions=torch.cat((batch.positions, none)),
        seq_lens=torch.cat((batch.seq_lens, none)),
        query_lens=torch.cat((batch.query_lens, torch.ones_like(none))),
        block_tables=tuple(map(longer, batch.block_tables)),
        sample_index=torch.arange(rows, dtype=torch.int32),
    )


def make_padding(
    rows: int,
    table_widths: Sequence[int],
    *,
    scratch_block: int,
    max_total_len: int,
    device: torch.device,
) -> StepInputs:
    """A step of padded rows alone, for sequences of up to `max_total_len` tokens."""

    def filled(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    seq_lens, query_lens = filled(0, rows), filled(1, rows)
    query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    slot_offsets = filled(0, rows, dtype=torch.int64)
    groups = tuple(
        AttentionMetadata(
            seq_lens=seq_lens,
            query_lens=query_lens,
            query_starts=query_starts,
            block_tables=filled(scratch_block, rows, width),
            first_blocks=filled(0, rows),
            slot_blocks=filled(scratch_block, rows, dtype=torch.int64),
            slot_offsets=slot_offsets,
            host_lens=torch.tensor([[0, 1]], dtype=torch.int32).repeat(rows, 1),
            max_query_len=1,
            max_total_len=max_total_len,
        )
        for width in table_widths
    )
    wanted = torch.arange(rows, dtype=torch.int32, device=device)
    return StepInputs(
        input_ids=filled(0, rows), positions=filled(0, rows), wanted=wanted, groups=groups
    )


def first_rows(inputs: StepInputs, rows: int) -> StepInputs:
    """Views of a decode step's first rows."""
    groups = tuple(
        replace(
            group,
            **{name: getattr(group, name)[:rows] for name in PER_ROW},
            query_starts=group.query_starts[: rows + 1],
            host_lens=group.host_lens[:rows],
        )
        for group in inputs.groups
    )
    return StepInputs(
        input_ids=inputs.input_ids[:rows],
        positions=inputs.positions[:rows],
        wanted=inputs.wanted[:rows],
        groups=groups,
    )


def copy_into(target: StepInputs, source: StepInputs) -> None:
    """Of decode steps of as many rows: what isn't the same in all of them."""
    targets = [target.input_ids, target.positions]
    sources = [source.input_ids, source.positions]
    for number, (into, group) in enumerate(zip(target.groups, source.groups, strict=True)):
        width = group.block_tables.shape[1]
        targets += [into.block_tables[:, :width], into.first_blocks, into.slot_blocks]
        sources += [group.block_tables, group.first_blocks, group.slot_blocks]
        if number == 0:  # the groups share these
            targets += [into.seq_lens, into.slot_offsets]
            sources += [group.seq_lens, group.slot_offsets]
    torch._foreach_copy_(targets, sources)
