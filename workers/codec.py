"""Between the wire's messages and what a rank runs: StepPlan to Batch.

Everything that arrives is checked here, so that a malformed step never reaches the device.
T tokens, S sequences, R sampled rows, P scored rows, G cache groups.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from protos import worker_pb2
from workers.arrays import (
    INT32,
    UINT64,
    Int32,
    check_each,
    check_range,
    read_array,
    to_int64,
    to_tensor,
)
from workers.batch import Batch, BlockTables, TokenReferences
from workers.config import CacheLayout, LayerCacheSpec, ModelSpec, WorkerConfig
from workers.errors import StepError
from workers.plan_parts import decode_scores, first_seen
from workers.sampling_codec import decode_columns, decode_inputs

NO_COPIES = torch.zeros(0, 2, dtype=torch.int32)
NOTHING_SHARED: Mapping[int, int] = MappingProxyType({})


class NotBuiltError(StepError):
    """The step asks for something that the protocol has room for and the worker can't do yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What the numbers of a step must stay below."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    windows: tuple[int, ...]  # [G] of the group's layers; 0: none
    chunks: tuple[int, ...]  # [G]


def limits_of(spec: ModelSpec, layout: CacheLayout) -> StepLimits:
    """The limits that a loaded model and its cache set."""
    firsts = [spec.layers[group[0]] for group in layout.groups]
    return StepLimits(
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        windows=tuple(layer.window for layer in firsts),
        chunks=tuple(layer.chunk for layer in firsts),
    )


def decode_plan(
    request: worker_pb2.StepRequest, limits: StepLimits, shared: Mapping[int, int] = NOTHING_SHARED
) -> Batch:
    """The plan of a request. `shared` has how many samples each of the steps before shares.

    Raises StepError: an array has a wrong length, sum or range. The message names it.

    Raises NotBuiltError: the step has block_ops other than copies.
    """
    plan = request.plan
    input_ids = read_array("input_ids", plan.input_ids, INT32)
    num_tokens = len(input_ids)
    sequence_ids = read_array("sequence_ids", plan.sequence_ids, UINT64)
    num_sequences = len(sequence_ids)
    if num_sequences == 0:
        raise StepError("sequence_ids is empty: a step has at least 1 sequence")
    if len(np.unique(sequence_ids)) != num_sequences:
        raise StepError(f"sequence_ids has {num_sequences} ids, not all different")
    query_lens = read_array("query_lens", plan.query_lens, INT32, num_sequences, "sequence_ids")
    check_range("query_lens", query_lens, 1, limits.max_model_len + 1)
    if query_lens.sum(dtype=np.int64) != num_tokens:
        raise StepError(f"query_lens sum to {query_lens.sum()}, input_ids has {num_tokens} tokens")
    seq_lens = read_array("seq_lens", plan.seq_lens, INT32, num_sequences, "sequence_ids")
    check_range("seq_lens", seq_lens, 0, limits.max_model_len + 1)
    check_range("seq_lens + query_lens", seq_lens + query_lens, 1, limits.max_model_len + 1)
    check_range("input_ids", input_ids, 0, limits.vocab_size)
    positions = read_array("positions", plan.positions, INT32, num_tokens, "input_ids")
    _check_positions(positions, seq_lens, query_lens)
    sample_index, sample_sequence = _decode_samples(plan, query_lens)
    return Batch(
        input_ids=to_tensor(input_ids),
        positions=to_tensor(positions),
        sequence_ids=tuple(sequence_ids.tolist()),
        seq_lens=to_tensor(seq_lens),
        query_lens=to_tensor(query_lens),
        block_tables=_decode_tables(plan, seq_lens, query_lens, limits),
        block_copies=decode_copies(plan, limits.num_blocks),
        sample_index=to_tensor(sample_index),
        sample_sequence=to_tensor(sample_sequence),
        sampling=decode_columns(plan.sampling, num_sequences),
        sampler_inputs=decode_inputs(request.sampler_inputs, len(sample_index), limits.vocab_size),
        defers_sampling=plan.defer_sampling,
        step_id=request.step_id,
        references=_decode_references(plan.token_references, num_tokens, shared),
        shares_samples=request.share_samples,
        **decode_scores(plan, num_tokens, limits.vocab_size),
    )


def input_hash(batch: Batch, input_ids: torch.Tensor) -> int:
    """First 8 bytes of a sha256, as a 64-bit number: what the step reads and writes, and where.

    Of input_ids, positions, query_lens, the block copies, and each group's first_blocks and
    block_ids, whose rows are padded with 0 to the longest. `input_ids` [T] are those that were run,
    where they were: on a device the hash waits for them.
    """
    digest = hashlib.sha256()
    tables = [part for each in batch.block_tables for part in (each.first_blocks, each.block_ids)]
    fed = (input_ids, batch.positions, batch.query_lens, batch.block_copies)
    for tensor in (*fed, *tables):
        digest.update(tensor.cpu().numpy().astype(INT32, copy=False).tobytes())
    return int.from_bytes(digest.digest()[:8], "little")


def decode_config(request: worker_pb2.InitializeRequest) -> WorkerConfig:
    """Raises StepError: there is no such rank."""
    if request.tp_size < 1:
        raise StepError(f"tp_size={request.tp_size} must be at least 1")
    if request.rank >= request.tp_size:
        raise StepError(f"rank={request.rank} must be less than tp_size={request.tp_size}")
    return WorkerConfig(
        model_path=request.model_path,
        rank=request.rank,
        tp_size=request.tp_size,
        rendezvous_host=request.rendezvous_host,
        rendezvous_port=request.rendezvous_port,
        interface=request.interface,
        address=request.address,
        dtype=request.dtype,
        device=request.device,
        attention=request.attention,
        deterministic=request.deterministic,
        quantization=request.quantization or "none",
        kv_cache_dtype=request.kv_cache_dtype or "auto",
        num_threads=request.num_threads,
        local_world_size=request.local_world_size,
        max_num_batched_tokens=request.max_num_batched_tokens,
        max_num_seqs=request.max_num_seqs,
        max_num_scored_tokens=request.max_num_scored_tokens,
        gpu_memory_fraction=request.gpu_memory_fraction,
        enforce_eager=request.enforce_eager,
        collective_timeout_s=request.collective_timeout_s,
    )


def decode_layout(request: worker_pb2.AllocateCacheRequest, spec: ModelSpec) -> CacheLayout:
    """Raises StepError: a size is 0, or the groups don't hold every layer once, by kinds."""
    for name, value in (("block_size", request.block_size), ("num_blocks", request.num_blocks)):
        if value < 1:
            raise StepError(f"{name}={value} must be at least 1")
    if request.block_size % spec.block_size_multiple:
        raise StepError(
            f"block_size={request.block_size} must be a multiple of {spec.block_size_multiple}, "
            f"which the attention backend {spec.attention} asks for"
        )
    groups = tuple(tuple(group.layers) for group in request.groups)
    named = sorted(layer for group in groups for layer in group)
    if named != list(range(len(spec.layers))):
        raise StepError(
            f"groups name layers {named}: must be each of the model's {len(spec.layers)} once"
        )
    for index, group in enumerate(groups):
        kinds = {(spec.layers[layer].window, spec.layers[layer].chunk) for layer in group}
        if len(kinds) != 1:
            raise StepError(
                f"groups[{index}] has layers of (window, chunk) {sorted(kinds)}: must be one kind"
            )
    return CacheLayout(block_size=request.block_size, num_blocks=request.num_blocks, groups=groups)


def encode_spec(spec: ModelSpec) -> worker_pb2.ModelSpec:
    return worker_pb2.ModelSpec(
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        eos_token_ids=spec.eos_token_ids,
        layers=[_encode_layer(layer) for layer in spec.layers],
        available_memory_bytes=spec.available_memory_bytes,
        block_size_multiple=spec.block_size_multiple,
        parameter_bytes=spec.parameter_bytes,
        attention=spec.attention,
    )


def _encode_layer(layer: LayerCacheSpec) -> worker_pb2.LayerCacheSpec:
    return worker_pb2.LayerCacheSpec(
        window=layer.window,
        chunk=layer.chunk,
        num_kv_heads=layer.num_kv_heads,
        k_dim=layer.k_dim,
        v_dim=layer.v_dim,
        element_bytes=layer.element_bytes,
    )


def _decode_samples(plan: worker_pb2.StepPlan, query_lens: Int32) -> tuple[Int32, Int32]:
    index = read_array("sample_index", plan.sample_index, INT32)
    sequence = read_array(
        "sample_sequence", plan.sample_sequence, INT32, len(index), "sample_index"
    )
    check_range("sample_sequence", sequence, 0, len(query_lens))
    if len(np.unique(sequence)) != len(sequence):
        raise NotBuiltError(
            "sample_sequence names a sequence twice: this worker samples one token of a sequence "
            "in a step"
        )
    ends = np.cumsum(query_lens, dtype=INT32)[sequence]
    starts = ends - query_lens[sequence]
    check_each("sample_index", index, starts, ends - 1)
    return index, sequence


def _decode_tables(
    plan: worker_pb2.StepPlan, seq_lens: Int32, query_lens: Int32, limits: StepLimits
) -> tuple[BlockTables, ...]:
    if len(plan.block_tables) != len(limits.windows):
        raise StepError(
            f"block_tables has {len(plan.block_tables)} tables, the cache has "
            f"{len(limits.windows)} groups"
        )
    ends = -(-(seq_lens + query_lens) // limits.block_size)
    tables = []
    kinds = zip(plan.block_tables, limits.windows, limits.chunks, strict=True)
    for group, (table, window, chunk) in enumerate(kinds):
        starts = first_seen(seq_lens, window, chunk) // limits.block_size
        tables.append(_decode_table(f"block_tables[{group}]", table, starts, ends, limits))
    return tuple(tables)


def _decode_table(
    name: str, table: worker_pb2.BlockTables, starts: Int32, ends: Int32, limits: StepLimits
) -> BlockTables:
    """Each sequence reads or writes its blocks from `starts` to `ends` [S] in this step."""
    count = len(starts)
    first = read_array(f"{name}.first_blocks", table.first_blocks, INT32, count, "sequence_ids")
    check_each(f"{name}.first_blocks", first, 0, starts)
    num_blocks = read_array(f"{name}.num_blocks", table.num_blocks, INT32, count, "sequence_ids")
    check_each(f"{name}.num_blocks", num_blocks, ends - first, limits.num_blocks)
    block_ids = read_array(f"{name}.block_ids", table.block_ids, INT32)
    total = int(num_blocks.sum(dtype=np.int64))
    if total != len(block_ids):
        raise StepError(f"{name}.num_blocks sum to {total}, block_ids has {len(block_ids)} blocks")
    check_range(f"{name}.block_ids", block_ids, 0, limits.num_blocks)
    padded = np.zeros((len(num_blocks), int(num_blocks.max())), np.int32)
    padded[np.arange(padded.shape[1]) < num_blocks[:, None]] = block_ids
    return BlockTables(block_ids=torch.from_numpy(padded), first_blocks=to_tensor(first))


def _decode_references(
    refer: worker_pb2.TokenReferences, num_tokens: int, shared: Mapping[int, int]
) -> TokenReferences:
    rows = read_array("token_references.rows", refer.rows, INT32)
    check_range("token_references.rows", rows, 0, num_tokens)
    if (np.diff(rows) < 1).any():
        raise StepError(f"token_references.rows {rows.tolist()} must rise")
    name = "token_references.step_ids"
    step_ids = read_array(name, refer.step_ids, UINT64, len(rows), "rows")
    name = "token_references.sample_rows"
    sample_rows = read_array(name, refer.sample_rows, INT32, len(rows), "rows")
    for step_id in np.unique(step_ids).tolist():
        if step_id not in shared:
            raise StepError(
                f"token_references.step_ids has {step_id}: samples are kept of {sorted(shared)}"
            )
        check_range(name, sample_rows[step_ids == step_id], 0, shared[step_id])
    return TokenReferences(
        rows=to_int64(rows), step_ids=to_int64(step_ids), sample_rows=to_int64(sample_rows)
    )


def decode_copies(
    plan: worker_pb2.StepPlan | worker_pb2.StepDelta, num_blocks: int
) -> torch.Tensor:
    """[K, 2] int32."""
    if not plan.block_ops:
        return NO_COPIES
    for place, op in enumerate(plan.block_ops):
        if op.kind != worker_pb2.BlockOp.KIND_COPY:
            raise NotBuiltError(f"block_ops[{place}].kind is {op.kind}: only KIND_COPY is built")
    sources = np.array([op.source_block for op in plan.block_ops], np.int64)
    targets = np.array([op.target_block for op in plan.block_ops], np.int64)
    check_range("block_ops.source_block", sources, 0, num_blocks)
    check_range("block_ops.target_block", targets, 0, num_blocks)
    return torch.from_numpy(np.stack((sources, targets), axis=1).astype(np.int32))


def _check_positions(positions: Int32, seq_lens: Int32, query_lens: Int32) -> None:
    starts = np.cumsum(query_lens, dtype=INT32) - query_lens
    expected = np.arange(len(positions), dtype=INT32) + np.repeat(seq_lens - starts, query_lens)
    wrong = np.flatnonzero(positions != expected)
    if len(wrong):
        row = int(wrong[0])
        raise StepError(
            f"positions[{row}] is {positions[row]}: must be {expected[row]}, "
            "the next token of its sequence after seq_lens"
        )
