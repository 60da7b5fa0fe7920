"""Builders of what the sampler is given, and what it should make of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers.generation import logits_process as theirs

from benchmarks.sampler.cases import COLUMNS
from workers.batch import (
    BadWords,
    MaskKind,
    SamplerInputs,
    SamplingColumns,
    TokenBiases,
    TokenHistory,
    TokenMasks,
)
from workers.sampling.sampler import Sampler, Samples

NEVER = float("-inf")
Mask = tuple[MaskKind, Sequence[int]]  # token ids; of BITS the allowed ones


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row to sample, and what its request asks for."""

    logits: torch.Tensor  # [V]
    position: int = 3
    columns: Mapping[str, float] = field(default_factory=dict)
    biases: Mapping[int, float] = field(default_factory=dict)
    mask: Mask | None = None
    grammar: Mask | None = None  # a mask that comes beside the inputs
    bad_words: Sequence[Sequence[int]] = ()
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()

    def asking(self, **columns: float) -> "Row":
        return replace(self, columns={**self.columns, **columns})


def sample(rows: Sequence[Row], eos_token_ids: Sequence[int] = ()) -> Samples:
    return Sampler(eos_token_ids).sample(*arguments(rows))


def arguments(
    rows: Sequence[Row],
) -> tuple[torch.Tensor, torch.Tensor, SamplingColumns, SamplerInputs, TokenMasks]:
    """Of Sampler.sample."""
    columns = {
        name: torch.tensor([row.columns.get(name, default) for row in rows], dtype=dtype)
        for name, (default, dtype) in COLUMNS.items()
    }
    inputs = SamplerInputs(
        biases=make_biases([row.biases for row in rows]),
        masks=make_masks([row.mask for row in rows], len(rows[0].logits)),
        bad_words=make_bad_words([row.bad_words for row in rows]),
        history=make_history([(row.prompt, row.output) for row in rows]),
    )
    return (
        torch.stack([row.logits for row in rows]),
        torch.tensor([row.position for row in rows]),
        SamplingColumns(**columns),
        inputs,
        make_masks([row.grammar for row in rows], len(rows[0].logits)),
    )


def make_columns(count: int, **columns: object) -> SamplingColumns:
    """One value or `count` for each column."""
    return SamplingColumns(
        **{
            name: torch.as_tensor(columns.get(name, default), dtype=dtype).expand(count)
            for name, (default, dtype) in COLUMNS.items()
        }
    )


def make_biases(biases: Sequence[Mapping[int, float]]) -> TokenBiases:
    return TokenBiases(
        rows=integers([row for row, each in enumerate(biases) for _ in each]),
        token_ids=integers([token for each in biases for token in each]),
        values=torch.tensor([value for each in biases for value in each.values()]).float(),
    )


def make_masks(masks: Sequence[Mask | None], vocab_size: int) -> TokenMasks:
    set_masks = [(row, *mask) for row, mask in enumerate(masks) if mask is not None]
    words = [
        pack_bits(ids, vocab_size) if kind is MaskKind.BITS else torch.tensor(ids).int()
        for _, kind, ids in set_masks
    ]
    return TokenMasks(
        rows=integers([row for row, _, _ in set_masks]),
        kinds=torch.tensor([kind for _, kind, _ in set_masks], dtype=torch.uint8),
        num_words=integers([len(each) for each in words]),
        words=torch.cat([torch.empty(0, dtype=torch.int32), *words]),
    )


def pack_bits(token_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
    words = [0] * -(-vocab_size // 32)
    for token in token_ids:
        words[token // 32] |= 1 << token % 32
    return torch.tensor([word - (1 << 32) if word >> 31 else word for word in words]).int()


def make_bad_words(bad_words: Sequence[Sequence[Sequence[int]]]) -> BadWords:
    return BadWords(
        rows=integers([row for row, each in enumerate(bad_words) for _ in each]),
        lengths=integers([len(word) for each in bad_words for word in each]),
        token_ids=integers([token for each in bad_words for word in each for token in word]),
    )


def make_history(history: Sequence[tuple[Sequence[int], Sequence[int]]]) -> TokenHistory:
    """Of prompts and outputs; rows without tokens are left out."""
    rows = [(row, *each) for row, each in enumerate(history) if each[0] or each[1]]
    return TokenHistory(
        rows=integers([row for row, _, _ in rows]),
        lengths=integers([len(prompt) + len(output) for _, prompt, output in rows]),
        num_prompt_tokens=integers([len(prompt) for _, prompt, _ in rows]),
        token_ids=integers([token for _, *parts in rows for part in parts for token in part]),
    )


def make_inputs() -> SamplerInputs:
    """That ask for nothing."""
    return SamplerInputs(
        biases=make_biases([]),
        masks=make_masks([], 1),
        bad_words=make_bad_words([]),
        history=make_history([]),
    )


def integers(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def spread_logits(vocab_size: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def expected_scores(row: Row, eos_token_ids: Sequence[int] = ()) -> torch.Tensor:
    """What transformers' own processors and warpers make of the logits: [V], -inf if forbidden."""
    ids = integers([*row.prompt, *row.output])[None]
    ask = {name: row.columns.get(name, default) for name, (default, _) in COLUMNS.items()}
    scores = row.logits[None].clone()
    for processor in [*_processors(row, ask, eos_token_ids), None, *_warpers(ask)]:
        scores = _less_output(scores, row, ask) if processor is None else processor(ids, scores)
    return scores[0]


def _processors(row: Row, ask: Mapping[str, float], eos: Sequence[int]) -> list[object]:
    chosen: list[object] = []
    if row.biases:
        each = [[[token], float(value)] for token, value in row.biases.items()]
        chosen.append(theirs.SequenceBiasLogitsProcessor(each))
    for mask in (row.mask, row.grammar):
        if mask is not None and mask[0] is MaskKind.FORBIDDEN:
            chosen.append(theirs.SuppressTokensLogitsProcessor(mask[1]))
        elif mask is not None:
            chosen.append(theirs.PrefixConstrainedLogitsProcessor(lambda *_, m=mask: list(m[1]), 1))
    if eos and row.position < ask["min_length"]:
        missing = int(ask["min_length"]) - row.position
        length = len(row.prompt) + len(row.output)
        chosen.append(
            theirs.MinNewTokensLengthLogitsProcessor(length, missing, eos_token_id=list(eos))
        )
    if row.bad_words:
        chosen.append(theirs.NoBadWordsLogitsProcessor([list(word) for word in row.bad_words]))
    if ask["repetition_penalty"] != 1:
        chosen.append(theirs.RepetitionPenaltyLogitsProcessor(float(ask["repetition_penalty"])))
    return chosen


def _less_output(scores: torch.Tensor, row: Row, ask: Mapping[str, float]) -> torch.Tensor:
    """Transformers has neither of these; the formula is OpenAI's."""
    counts = integers(row.output).bincount(minlength=scores.shape[1])
    less = ask["frequency_penalty"] * counts + ask["presence_penalty"] * (counts > 0)
    return scores - less


def _warpers(ask: Mapping[str, float]) -> list[object]:
    chosen: list[object] = []
    if ask["temperature"] != 1:
        chosen.append(theirs.TemperatureLogitsWarper(float(ask["temperature"])))
    if ask["top_k"]:
        chosen.append(theirs.TopKLogitsWarper(int(ask["top_k"])))
    if ask["top_p"] < 1:
        chosen.append(theirs.TopPLogitsWarper(float(ask["top_p"])))
    if ask["min_p"]:
        chosen.append(theirs.MinPLogitsWarper(float(ask["min_p"])))
    return chosen
