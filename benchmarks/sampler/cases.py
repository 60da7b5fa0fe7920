"""What is sampled: logits of two shapes, and rows that ask for one thing or for many."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from workers.batch import (
    NO_MASKS,
    BadWords,
    SamplerInputs,
    SamplingColumns,
    TokenBiases,
    TokenHistory,
)

HISTORY_TOKENS = 1000  # of a row with penalties, half of them prompt
NUM_PEAKS = 16

Ask = Mapping[str, float]  # of one row, by column; what is missing asks for nothing
COLUMNS: Mapping[str, tuple[float, torch.dtype]] = {
    "temperature": (1.0, torch.float32),
    "top_k": (0, torch.int32),
    "top_p": (1.0, torch.float32),
    "min_p": (0.0, torch.float32),
    "seed": (0, torch.int64),
    "min_length": (0, torch.int32),
    "presence_penalty": (0.0, torch.float32),
    "frequency_penalty": (0.0, torch.float32),
    "repetition_penalty": (1.0, torch.float32),
    "num_logprobs": (-1, torch.int32),
}
GREEDY: Ask = {"temperature": 0.0}
TEMPERATURE: Ask = {"temperature": 0.8}
TOP_P: Ask = {"top_p": 0.9}
TOP_K_TOP_P: Ask = {"top_k": 50, "top_p": 0.9}
FULL: Ask = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "num_logprobs": 5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Rows ask for `asks` in turn."""

    name: str
    says: str
    asks: tuple[Ask, ...] = field(hash=False)
    peaked: bool


KINDS = (
    Kind(name="greedy", says="temperature 0", asks=(GREEDY,), peaked=False),
    Kind(name="temperature", says="temperature 0.8", asks=(TEMPERATURE,), peaked=False),
    Kind(name="top_p_peaked", says="top-p 0.9", asks=(TOP_P,), peaked=True),
    Kind(name="top_p_flat", says="top-p 0.9", asks=(TOP_P,), peaked=False),
    Kind(name="top_k_top_p", says="top-k 50, top-p 0.9", asks=(TOP_K_TOP_P,), peaked=True),
    Kind(name="full", says="all of it, logprobs 5", asks=(FULL,), peaked=True),
    Kind(
        name="mixed",
        says="each of these in turn",
        asks=(GREEDY, TEMPERATURE, TOP_P, TOP_K_TOP_P, FULL),
        peaked=True,
    ),
)


def make_logits(num_rows: int, vocab_size: int, *, peaked: bool) -> torch.Tensor:
    """[R, V] float32. Flat: normal. Peaked: a few tokens with nearly all of the mass, as texts."""
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    if peaked:
        logits *= 3
        places = torch.randint(vocab_size, (num_rows, NUM_PEAKS), generator=generator)
        logits.scatter_(1, places, torch.arange(NUM_PEAKS).flip(0).expand(num_rows, -1) + 7.0)
    return logits


def make_columns(kind: Kind, num_rows: int) -> SamplingColumns:
    """Each row has a seed of its own."""
    asks = [{"seed": row, **kind.asks[row % len(kind.asks)]} for row in range(num_rows)]
    return SamplingColumns(
        **{
            name: torch.tensor([ask.get(name, default) for ask in asks], dtype=dtype)
            for name, (default, dtype) in COLUMNS.items()
        }
    )


def make_inputs(columns: SamplingColumns, vocab_size: int) -> SamplerInputs:
    """History of the rows with penalties: some tokens often, most of them seldom."""
    none = torch.zeros(0, dtype=torch.int64)
    rows = (columns.repetition_penalty != 1).nonzero().flatten()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.rand(len(rows) * HISTORY_TOKENS, generator=generator).pow(3) * vocab_size
    return SamplerInputs(
        biases=TokenBiases(rows=none, token_ids=none, values=none.float()),
        masks=NO_MASKS,
        bad_words=BadWords(rows=none, lengths=none, token_ids=none),
        history=TokenHistory(
            rows=rows,
            lengths=torch.full_like(rows, HISTORY_TOKENS),
            num_prompt_tokens=torch.full_like(rows, HISTORY_TOKENS // 2),
            token_ids=tokens.long(),
        ),
    )
