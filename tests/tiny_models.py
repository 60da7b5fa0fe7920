"""Tiny random checkpoints, what transformers makes of them, and a driver of ModelExecutor.

Apart from the other builders because it imports torch.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from protos import worker_pb2
from runtime.cluster.loaded_model import loaded_model
from runtime.scheduling.cache_layout import make_cache_layout
from tests.families import FAMILIES, VOCABULARY
from workers.batch import Batch, BlockTables, SamplingColumns
from workers.codec import encode_spec
from workers.config import CacheLayout, ModelSpec, WorkerConfig
from workers.model_executor import ModelExecutor
from workers.parallel import TensorParallel, Topology
from workers.sampling_codec import decode_inputs

NEW_TOKENS = 12
BOUND = 1e-4  # of the logits' standard deviation


def save_tiny_model(
    folder: Path, family: str = "llama", *, shard_size: str = "50GB", **changes: object
) -> Path:
    """A checkpoint whose every parameter is random enough to matter."""
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return save_random(folder, config, shard_size=shard_size)


def save_random(folder: Path, config: PreTrainedConfig, *, shard_size: str = "50GB") -> Path:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(folder.name.encode()))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.25
            # Vectors are norms and biases: kept near what they are, but all different.
            parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


@dataclass(frozen=True)
class Expected:
    """What transformers computes for two texts; saved beside a checkpoint."""

    texts: list[list[int]]  # random tokens
    logits: list[torch.Tensor]  # per text [len(text), V], eager
    greedy: list[list[int]]  # what generate continues each text with


def expect(folder: Path) -> Expected:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    draw = random.Random(7)
    texts = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (35, 19)]
    logits, greedy = [], []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([text])
            logits.append(model(input_ids=ids, use_cache=False).logits[0].clone())
            continued = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
            greedy.append(continued[0, len(text) :].tolist())
    return Expected(texts, logits, greedy)


def load_executor(
    folder: Path,
    parallel: TensorParallel | None = None,
    on_progress: Callable[[int, int], None] = lambda loaded, total: None,
    *,
    dtype: str = "auto",
    attention: str = "auto",
    **changes: Any,
) -> ModelExecutor:
    parallel = parallel or TensorParallel(Topology(tp=1), 0, None)
    config = WorkerConfig(
        model_path=str(folder),
        rank=parallel.rank,
        tp_size=parallel.size,
        dtype=dtype,
        attention=attention,
        **{"num_threads": 1} | changes,
    )
    return ModelExecutor(config, parallel, on_progress)


def make_layout(spec: ModelSpec, *, num_blocks: int = 192, block_size: int = 4) -> CacheLayout:
    """The driver's groups, and as many blocks as are asked for; as large as the backend takes."""
    block_size = -(-block_size // spec.block_size_multiple) * spec.block_size_multiple
    layout = make_cache_layout(
        loaded_model([encode_spec(spec)]).layers,
        block_size=block_size,
        memory_bytes=1 << 40,
        max_num_seqs=8,
        max_model_len=spec.max_model_len,
        max_chunk_tokens=64,
    )
    groups = tuple(group.layers for group in layout.groups)
    return CacheLayout(block_size=block_size, num_blocks=num_blocks, groups=groups)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence's part of a step."""

    sequence_id: int
    tokens: Sequence[int]
    seq_len: int  # tokens in the cache before
    block_tables: Sequence[Sequence[int]]  # one per cache group
    sample: Sequence[int] = (-1,)  # which of the tokens get logits; the last by default
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_length: int = 0
    num_logprobs: int = -1
    num_scored_tops: int | None = None  # all tokens but the first are scored
    first_blocks: Sequence[int] = ()  # one per cache group; 0 where there is none


def make_batch(rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> Batch:
    lengths = [len(row.tokens) for row in rows]
    starts = [sum(lengths[:index]) for index in range(len(rows))]
    samples = [
        (index, start + offset % len(row.tokens))
        for index, (row, start) in enumerate(zip(rows, starts, strict=True))
        for offset in row.sample
    ]
    scores = [
        (start + offset, row.tokens[offset + 1], row.num_scored_tops)
        for row, start in zip(rows, starts, strict=True)
        for offset in range(len(row.tokens) - 1 if row.num_scored_tops is not None else 0)
    ]
    int32 = torch.int32
    return Batch(
        input_ids=torch.tensor([token for row in rows for token in row.tokens], dtype=int32),
        positions=torch.tensor(
            [row.seq_len + offset for row in rows for offset in range(len(row.tokens))],
            dtype=int32,
        ),
        sequence_ids=tuple(row.sequence_id for row in rows),
        seq_lens=torch.tensor([row.seq_len for row in rows], dtype=int32),
        query_lens=torch.tensor(lengths, dtype=int32),
        block_tables=tuple(_tables(rows, group) for group in range(len(rows[0].block_tables))),
        block_copies=torch.tensor(copies, dtype=int32).view(-1, 2),
        sample_index=torch.tensor([place for _, place in samples], dtype=int32),
        sample_sequence=torch.tensor([index for index, _ in samples], dtype=int32),
        sampling=SamplingColumns(
            temperature=torch.tensor([row.temperature for row in rows]),
            top_k=torch.tensor([row.top_k for row in rows], dtype=int32),
            top_p=torch.tensor([row.top_p for row in rows]),
            min_p=torch.zeros(len(rows)),
            seed=torch.tensor([row.seed for row in rows]),
            min_length=torch.tensor([row.min_length for row in rows], dtype=int32),
            presence_penalty=torch.zeros(len(rows)),
            frequency_penalty=torch.zeros(len(rows)),
            repetition_penalty=torch.ones(len(rows)),
            num_logprobs=torch.tensor([row.num_logprobs for row in rows], dtype=int32),
        ),
        sampler_inputs=decode_inputs(worker_pb2.SamplerInputs(), len(samples), VOCABULARY),
        defers_sampling=False,
        score_index=torch.tensor([place for place, _, _ in scores], dtype=int32),
        score_token_ids=torch.tensor([token for _, token, _ in scores], dtype=int32),
        score_num_tops=torch.tensor([count for _, _, count in scores], dtype=int32),
    )


def _tables(rows: Sequence[Row], group: int) -> BlockTables:
    tables = [row.block_tables[group] for row in rows]
    width = max(map(len, tables))
    ids = torch.tensor([[*table, *[0] * width][:width] for table in tables])
    first = torch.tensor([row.first_blocks[group] if row.first_blocks else 0 for row in rows])
    return BlockTables(block_ids=ids.int(), first_blocks=first.int())


class Feeder:
    """Feeds tokens to an executor and keeps the block tables, blocks in random order."""

    def __init__(self, executor: ModelExecutor, *, num_blocks: int = 192) -> None:
        self.executor = executor
        self.layout = make_layout(executor.spec, num_blocks=num_blocks)
        executor.allocate_cache(self.layout)
        self._free = list(range(num_blocks))
        random.Random(3).shuffle(self._free)
        self._lengths: dict[int, int] = {}
        self._tables: dict[int, list[list[int]]] = {}

    def row(self, sequence_id: int, tokens: Sequence[int], **fields: object) -> Row:
        """The next tokens of a sequence; to be run before its next row is made."""
        seq_len = self._lengths.get(sequence_id, 0)
        tables = self._tables.setdefault(sequence_id, [[] for _ in self.layout.groups])
        while len(tables[0]) * self.layout.block_size < seq_len + len(tokens):
            for table in tables:
                table.append(self._free.pop())
        self._lengths[sequence_id] = seq_len + len(tokens)
        return Row(
            sequence_id=sequence_id,
            tokens=tokens,
            seq_len=seq_len,
            block_tables=[list(table) for table in tables],
            **fields,
        )


def forced_logits(feeder: Feeder, texts: Sequence[Sequence[int]]) -> list[torch.Tensor] | None:
    """Logits of every token of two texts fed together; None on ranks that don't sample.

    The first comes in chunks of 9, the second starts late with a chunk of 5; both end token by
    token, so that chunks and single tokens meet in one batch.
    """
    first, second = texts
    plan = [((0, 9), (0, 0)), ((9, 18), (0, 5)), ((18, 23), (5, 6)), ((23, 24), (6, 11))]
    while plan[-1][0][1] < len(first) or plan[-1][1][1] < len(second):
        ends = plan[-1][0][1], plan[-1][1][1]
        plan.append(((ends[0], min(ends[0] + 1, 35)), (ends[1], min(ends[1] + 1, 19))))
    found: list[list[torch.Tensor]] = [[], []]
    for ranges in plan:
        parts = [(0, first[slice(*ranges[0])]), (1, second[slice(*ranges[1])])]
        rows = [feeder.row(number, part, sample=range(len(part))) for number, part in parts if part]
        logits = feeder.executor.compute_logits(make_batch(rows))
        if logits is not None:
            pieces = logits.split([len(row.tokens) for row in rows])
            for row, piece in zip(rows, pieces, strict=True):
                found[row.sequence_id].append(piece)
    return [torch.cat(pieces) for pieces in found] if found[0] else None


def greedy_tokens(
    feeder: Feeder, texts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> list[list[int]] | None:
    """What follows each text and each beginning of its continuation; None without a sampler.

    Equals `continuations` when they are greedy: feeding them keeps all ranks at the same tokens.
    """
    output: list[list[int]] = [[] for _ in texts]
    feed = [list(text) for text in texts]
    for place in range(len(continuations[0])):
        rows = [feeder.row(100 + number, tokens) for number, tokens in enumerate(feed)]
        tokens = feeder.executor.execute_model(make_batch(rows))
        for sequence_id, token in tokens.items():
            output[sequence_id - 100].append(token)
        feed = [[continuation[place]] for continuation in continuations]
    return output if output[0] else None


def error_in_std(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference of logits, in standard deviations of the expected ones."""
    return max(
        float((mine - theirs).abs().max() / theirs.std())
        for mine, theirs in zip(found, expected, strict=True)
    )
