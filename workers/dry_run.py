"""A step as large as any that the driver may send, run to see what memory it takes."""

from collections.abc import Callable
from itertools import pairwise

import torch

from workers.batch import NO_INPUTS, Batch, BlockTables, SamplingColumns
from workers.cached_model import CachedModel
from workers.config import CacheLayout, WorkerConfig
from workers.memory import DeviceMemory, MemoryUse, explaining, measure

BLOCK_SIZE = 16  # of the cache that it runs on, or the least that the attention backend takes


def measure_model(
    model: CachedModel,
    memory: DeviceMemory,
    config: WorkerConfig,
    *,
    max_model_len: int,
    run: Callable[[Batch], None],
) -> MemoryUse:
    """Gives the model a cache for one step and for the first graphs, and takes it away again.

    Raises ModelError: memory doesn't suffice.
    """
    block_size = -(-BLOCK_SIZE // model.block_size_multiple) * model.block_size_multiple
    batch = largest_batch(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_scored_tokens=config.max_num_scored_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
    )
    layout = one_group(batch, block_size=block_size, num_layers=len(model.layers))

    def run_largest_step() -> None:
        model.allocate(layout, available_bytes=memory.free())
        run(batch)

    def capture() -> int:
        memory.release()
        free = [memory.free()]
        num_graphs = model.capture(lambda *_: free.append(memory.free()), most=2)
        model.release()
        taken = [before - after for before, after in pairwise(free)]
        return sum(taken) + (taken[-1] * (num_graphs - len(taken)) if taken else 0)

    sizes = "--max-num-batched-tokens or --max-num-seqs"
    with explaining("the largest step", f"set {sizes} to less, or --tp to more"):
        return measure(
            memory,
            fraction=config.gpu_memory_fraction,
            run_largest_step=run_largest_step,
            capture=capture,
        )


def largest_batch(
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_num_scored_tokens: int,
    max_model_len: int,
    block_size: int,
) -> Batch:
    """Sequences of equal length, one cache group. All use the same blocks, from 0 on.

    All are sampled, by the rule that takes most memory, and as many tokens are scored as may be.
    More than `max_num_seqs` where they would be too long. Penalties, biases and masks aren't in it.
    """
    least = -(-max_num_batched_tokens // max_model_len)
    num_seqs = max(least, min(max_num_seqs, max_num_batched_tokens))
    query_lens = torch.full((num_seqs,), max_num_batched_tokens // num_seqs, dtype=torch.int32)
    query_lens[: max_num_batched_tokens % num_seqs] += 1
    lengths = query_lens.tolist()
    num_blocks = -(-max(lengths) // block_size)
    blocks = torch.arange(num_blocks, dtype=torch.int32).repeat(num_seqs, 1)
    none = torch.zeros(num_seqs, dtype=torch.int32)
    scored = torch.arange(min(max_num_scored_tokens, max_num_batched_tokens), dtype=torch.int32)
    return Batch(
        input_ids=torch.zeros(max_num_batched_tokens, dtype=torch.int32),
        positions=torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]),
        sequence_ids=tuple(range(num_seqs)),
        seq_lens=none,
        query_lens=query_lens,
        block_tables=(BlockTables(block_ids=blocks, first_blocks=none),),
        block_copies=torch.zeros(0, 2, dtype=torch.int32),
        sample_index=query_lens.cumsum(0, dtype=torch.int32) - 1,
        sample_sequence=torch.arange(num_seqs, dtype=torch.int32),
        sampling=SamplingColumns(
            temperature=torch.ones(num_seqs),
            top_k=none,
            top_p=torch.full((num_seqs,), 0.9),
            min_p=torch.zeros(num_seqs),
            seed=torch.arange(num_seqs),
            min_length=none,
            presence_penalty=torch.zeros(num_seqs),
            frequency_penalty=torch.zeros(num_seqs),
            repetition_penalty=torch.ones(num_seqs),
            num_logprobs=none - 1,
        ),
        sampler_inputs=NO_INPUTS,
        defers_sampling=False,
        score_index=scored,
        score_token_ids=torch.zeros_like(scored),
        score_num_tops=torch.zeros_like(scored),
    )


def one_group(batch: Batch, *, block_size: int, num_layers: int) -> CacheLayout:
    """The cache that `largest_batch` runs on: all layers, whatever their windows."""
    num_blocks = batch.block_tables[0].block_ids.shape[1]
    return CacheLayout(
        block_size=block_size, num_blocks=num_blocks, groups=(tuple(range(num_layers)),)
    )
