"""Models of real shapes with random weights, and the steps that they are measured with."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from workers.batch import NO_INPUTS, Batch, BlockTables, SamplingColumns
from workers.config import CacheLayout, WorkerConfig
from workers.model_executor import ModelExecutor
from workers.parallel import TensorParallel, Topology

NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's configuration; `rows` are the decode batches that it is measured with."""

    name: str
    config: PreTrainedConfig
    rows: tuple[int, ...]
    context: int  # tokens in the cache before a decode step
    prefill: int  # tokens of a prefill step
    dtype: str


def real_shapes() -> list[Shape]:
    qwen = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **NO_TOKENS,
    )
    llama = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        **NO_TOKENS,
    )
    rows = (1, 8, 64, 256)
    return [
        Shape("Qwen3-0.6B", qwen, rows, context=1024, prefill=8192, dtype="bfloat16"),
        Shape("Llama-3.1-8B", llama, rows, context=1024, prefill=8192, dtype="bfloat16"),
    ]


def tiny_shapes() -> list[Shape]:
    """As quick on a CPU as can be: they try the program, and measure nothing."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=256,
        **NO_TOKENS,
    )
    return [Shape("tiny", config, (1, 3), context=40, prefill=64, dtype="float32")]


def load(
    shape: Shape,
    folder: Path,
    device: torch.device,
    *,
    enforce_eager: bool = False,
    deterministic: bool = False,
) -> ModelExecutor:
    """With a cache for the largest decode batch."""
    shape.config.save_pretrained(folder)
    executor = load_folder(
        folder,
        device,
        dtype=shape.dtype,
        random_weights=True,
        max_num_batched_tokens=shape.prefill,
        max_num_seqs=max(shape.rows),
        enforce_eager=enforce_eager,
        deterministic=deterministic,
    )
    per_row = -(-(shape.context + 1) // block_size(executor))
    needed = max(max(shape.rows) * per_row, -(-shape.prefill // block_size(executor)))
    allocate(executor, needed)
    return executor


def load_folder(folder: Path, device: torch.device, **options: object) -> ModelExecutor:
    parallel = TensorParallel(Topology(tp=1), 0, None)
    options.setdefault("num_threads", torch.get_num_threads())
    config = WorkerConfig(model_path=str(folder), device=device.type, **options)  # type: ignore[arg-type]
    return ModelExecutor(config, parallel, lambda loaded, total: None)


def block_size(executor: ModelExecutor) -> int:
    return -(-16 // executor.spec.block_size_multiple) * executor.spec.block_size_multiple


def allocate(executor: ModelExecutor, num_blocks: int) -> CacheLayout:
    """All layers in one group: windows are honoured, only no block is given back."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for index, layer in enumerate(executor.spec.layers):
        kinds.setdefault((layer.window, layer.chunk), []).append(index)
    layout = CacheLayout(
        block_size=block_size(executor),
        num_blocks=num_blocks * len(kinds),
        groups=tuple(map(tuple, kinds.values())),
    )
    executor.allocate_cache(layout)
    return layout


def make_step(
    executor: ModelExecutor,
    *,
    seq_lens: list[int],
    query_lens: list[int],
    tokens: torch.Tensor | None = None,
    reach: int = 0,
) -> Batch:
    """Every sequence is sampled, greedily.

    Tables are of blocks in random order, the same for all steps of as many sequences that reach as
    far, or to `reach`.
    """
    size = block_size(executor)
    num_groups = len({(layer.window, layer.chunk) for layer in executor.spec.layers})
    ends = [cached + fed for cached, fed in zip(seq_lens, query_lens, strict=True)]
    width = -(-max(reach, *ends) // size)
    count = len(seq_lens)
    order = torch.randperm(count * width * num_groups, generator=torch.Generator().manual_seed(3))
    blocks = order.int().view(num_groups, count, width)
    fed = torch.tensor(query_lens, dtype=torch.int32)
    none = torch.zeros(count, dtype=torch.int32)
    no_rows = torch.zeros(0, dtype=torch.int32)
    if tokens is None:
        generator = torch.Generator().manual_seed(sum(ends))
        tokens = torch.randint(executor.spec.vocab_size, (sum(query_lens),), generator=generator)
    places = [
        torch.arange(start, end, dtype=torch.int32)
        for start, end in zip(seq_lens, ends, strict=True)
    ]
    return Batch(
        input_ids=tokens.int(),
        positions=torch.cat(places),
        sequence_ids=tuple(range(count)),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        query_lens=fed,
        block_tables=tuple(BlockTables(block_ids=ids, first_blocks=none) for ids in blocks),
        block_copies=torch.zeros(0, 2, dtype=torch.int32),
        sample_index=fed.cumsum(0, dtype=torch.int32) - 1,
        sample_sequence=torch.arange(count, dtype=torch.int32),
        sampling=SamplingColumns(
            temperature=torch.zeros(count),
            top_k=none,
            top_p=torch.ones(count),
            min_p=torch.zeros(count),
            seed=torch.zeros(count, dtype=torch.int64),
            min_length=none,
            presence_penalty=torch.zeros(count),
            frequency_penalty=torch.zeros(count),
            repetition_penalty=torch.ones(count),
            num_logprobs=none - 1,
        ),
        sampler_inputs=NO_INPUTS,
        defers_sampling=False,
        score_index=no_rows,
        score_token_ids=no_rows,
        score_num_tops=no_rows,
    )
