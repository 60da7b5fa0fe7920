"""Builders of logits and of what rows ask of the sampler."""

from collections.abc import Sequence
from dataclasses import fields

import torch

from workers.sampler import Sampler, SamplingRows


def sample(
    logits: torch.Tensor, rows: SamplingRows, eos_token_ids: Sequence[int] = ()
) -> torch.Tensor:
    return Sampler(eos_token_ids).sample(logits, rows)


def make_rows(
    count: int, *, temperature=1.0, top_k=0, top_p=1.0, seed=None, position=3, min_length=0
):
    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(count)

    return SamplingRows(
        sequence_ids=tuple(range(count)),
        positions=column(position, torch.int64),
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        seed=torch.arange(count) if seed is None else column(seed, torch.int64),
        min_length=column(min_length, torch.int32),
    )


def pick(rows: SamplingRows, index: torch.Tensor) -> SamplingRows:
    columns = {field.name: getattr(rows, field.name) for field in fields(rows)}
    sequence_ids = columns.pop("sequence_ids")
    return SamplingRows(
        sequence_ids=tuple(sequence_ids[i] for i in index.tolist()),
        **{name: column[index] for name, column in columns.items()},
    )


def spread_logits(vocabulary: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def mixed_batch(vocabulary: int, count: int = 24) -> tuple[torch.Tensor, SamplingRows]:
    """Rows of every kind. Every fifth may not end yet."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(count, vocabulary, generator=generator) * 3
    number = torch.arange(count)
    kind = number % 6
    rows = SamplingRows(
        sequence_ids=tuple(range(count)),
        positions=number * 17,
        temperature=torch.tensor([0.0, 1.0, 0.8, 1.3, 1.0, 2.0])[kind],
        top_k=torch.tensor([0, 0, 40, 0, 7, 1 << 20], dtype=torch.int32)[kind],
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.9, 0.5, 1.0])[kind],
        seed=torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator),
        min_length=torch.where(number % 5 == 0, number * 17 + 1, 0).int(),
    )
    return logits, rows
