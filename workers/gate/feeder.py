"""Feeds tokens to loaded ranks step by step, as a driver would, and keeps the block tables."""

import random
from collections.abc import Sequence

import torch

from workers.batch import NO_INPUTS, Batch, BlockTables, SamplingColumns
from workers.config import CacheLayout, ModelSpec

BLOCK_SIZE = 4


class Feeder:
    """The sequences of one test; blocks are handed out in random order."""

    def __init__(self, spec: ModelSpec, *, max_tokens: int, loses_blocks: bool = False) -> None:
        """`max_tokens` are those of all sequences together.

        With `loses_blocks` tables name an empty block in place of the last one that is full: what
        a wrong engine might do, and a test must notice.
        """
        # Every attention call has tables of its own.
        groups = tuple((layer,) for layer in range(len(spec.layers)))
        num_blocks = len(groups) * (max_tokens // BLOCK_SIZE + 8) + 1
        self.layout = CacheLayout(block_size=BLOCK_SIZE, num_blocks=num_blocks, groups=groups)
        self._lost = num_blocks - 1 if loses_blocks else None
        self._free = list(range(num_blocks - 1))
        random.Random(3).shuffle(self._free)
        self._lengths: dict[int, int] = {}
        self._tables: dict[int, list[list[int]]] = {}

    def batch(self, parts: Sequence[tuple[int, Sequence[int]]]) -> Batch:
        """The step that feeds each (sequence, its next tokens); every token gets logits."""
        seq_lens = [self._lengths.get(sequence, 0) for sequence, _ in parts]
        query_lens = [len(tokens) for _, tokens in parts]
        for (sequence, _), seq_len, query_len in zip(parts, seq_lens, query_lens, strict=True):
            self._grow(sequence, seq_len + query_len)
        sequences = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(query_lens))
        positions = torch.cat(
            [
                torch.arange(seq_len, seq_len + query_len)
                for seq_len, query_len in zip(seq_lens, query_lens, strict=True)
            ]
        )
        ids = torch.cat([torch.as_tensor(tokens) for _, tokens in parts])
        nothing = torch.zeros(0, dtype=torch.int32)
        return Batch(
            input_ids=ids.int(),
            positions=positions.int(),
            sequence_ids=tuple(sequence for sequence, _ in parts),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            query_lens=torch.tensor(query_lens, dtype=torch.int32),
            block_tables=tuple(
                _table(
                    [
                        self._seen(self._tables[sequence][group], seq_len)
                        for (sequence, _), seq_len in zip(parts, seq_lens, strict=True)
                    ]
                )
                for group in range(len(self.layout.groups))
            ),
            block_copies=torch.zeros(0, 2, dtype=torch.int32),
            sample_index=torch.arange(len(ids), dtype=torch.int32),
            sample_sequence=sequences.int(),
            sampling=_greedy(len(parts)),
            sampler_inputs=NO_INPUTS,
            defers_sampling=False,
            score_index=nothing,
            score_token_ids=nothing,
            score_num_tops=nothing,
        )

    def _seen(self, table: list[int], seq_len: int) -> list[int]:
        last_full = seq_len // BLOCK_SIZE - 1
        if self._lost is None or last_full < 0:
            return table
        return [*table[:last_full], self._lost, *table[last_full + 1 :]]

    def _grow(self, sequence: int, length: int) -> None:
        self._lengths[sequence] = length
        tables = self._tables.setdefault(sequence, [[] for _ in self.layout.groups])
        for table in tables:
            while len(table) * BLOCK_SIZE < length:
                table.append(self._free.pop())


def _table(tables: Sequence[Sequence[int]]) -> BlockTables:
    width = max(map(len, tables))
    return BlockTables(
        block_ids=torch.tensor([[*table, *[0] * width][:width] for table in tables]).int(),
        first_blocks=torch.zeros(len(tables), dtype=torch.int32),
    )


def _greedy(num_sequences: int) -> SamplingColumns:
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_sequences,), value, dtype=dtype)

    return SamplingColumns(
        temperature=column(0, torch.float32),
        top_k=column(0, torch.int32),
        top_p=column(1, torch.float32),
        min_p=column(0, torch.float32),
        seed=column(0, torch.int64),
        min_length=column(0, torch.int32),
        presence_penalty=column(0, torch.float32),
        frequency_penalty=column(0, torch.float32),
        repetition_penalty=column(1, torch.float32),
        num_logprobs=column(-1, torch.int32),
    )
