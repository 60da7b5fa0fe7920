"""Steps that compute what a cache held: the tokens of one sequence, chunk by chunk."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from runtime.scheduling.cache_layout import CacheLayout
from runtime.scheduling.sampler_inputs import Int32, no_inputs
from runtime.scheduling.step_plan import BlockTables, SamplingColumns, StepPlan

if TYPE_CHECKING:
    from array import array

# Blocks of a sequence by cache group and place.
Places = dict[tuple[int, int], int]


class Pool:
    """Numbers blocks anew, from 0 on, and lends some for a while."""

    def __init__(self) -> None:
        self.size = 0
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []

    def number(self, block: int) -> int:
        """Always the same for the same block."""
        number = self._numbers.get(block)
        if number is None:
            number = self._numbers[block] = self._new()
        return number

    def borrow(self) -> int:
        return self._free.pop() if self._free else self._new()

    def give_back(self, number: int) -> None:
        self._free.append(number)

    def _new(self) -> int:
        self.size += 1
        return self.size - 1


def fill_plans(
    layout: CacheLayout,
    text: "array[int]",
    places: Mapping[tuple[int, int], int],
    pool: Pool,
    *,
    chunk: int,
) -> Iterator[StepPlan]:
    """Fills the blocks at `places` with a text's tokens, as far as they go.

    `chunk` is the most tokens of a step. All else that is computed on the way goes to borrowed
    blocks, which are given back.
    """
    size = layout.block_size
    length = min(len(text), size * (1 + max(place for _, place in places)))
    borrowed: Places = {}
    for start in range(0, length, chunk):
        end = min(length, start + chunk)
        firsts = layout.first_blocks(start)
        for (group, place), number in [*borrowed.items()]:
            if place < firsts[group]:
                pool.give_back(number)
                del borrowed[group, place]
        tables = []
        for group, first in enumerate(firsts):
            blocks = []
            for place in range(first, -(-end // size)):
                key = group, place
                if key not in places and key not in borrowed:
                    borrowed[key] = pool.borrow()
                blocks.append(places[key] if key in places else borrowed[key])
            tables.append(_table(first, blocks))
        yield _plan(text[start:end], start, tables)
    for number in borrowed.values():
        pool.give_back(number)


def _table(first: int, blocks: Sequence[int]) -> BlockTables:
    return BlockTables(
        num_blocks=_ints(len(blocks)), first_blocks=_ints(first), block_ids=_ints(*blocks)
    )


def _plan(tokens: "array[int]", start: int, tables: list[BlockTables]) -> StepPlan:
    """One sequence, which samples nothing."""
    return StepPlan(
        step_id=0,
        input_ids=_ints(*tokens),
        positions=np.arange(start, start + len(tokens), dtype=np.int32),
        sequence_ids=np.ones(1, np.uint64),
        seq_lens=_ints(start),
        query_lens=_ints(len(tokens)),
        block_tables=tuple(tables),
        sample_index=_ints(),
        sample_sequence=_ints(),
        sampling=_greedy(),
        sampler_inputs=no_inputs(),
        defer_sampling=False,
        score_index=_ints(),
        score_token_ids=_ints(),
        score_num_tops=_ints(),
        block_copies=_ints().reshape(-1, 2),
    )


def _greedy() -> SamplingColumns:
    zeros, none = np.zeros(1, np.float32), _ints(0)
    return SamplingColumns(
        temperature=zeros,
        top_k=none,
        top_p=np.ones(1, np.float32),
        seed=np.zeros(1, np.uint64),
        min_p=zeros,
        min_length=none,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        repetition_penalty=np.ones(1, np.float32),
        num_logprobs=_ints(-1),
    )


def _ints(*values: int) -> Int32:
    return np.array(values, np.int32)
