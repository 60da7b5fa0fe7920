"""One flattened step as a rank sees it: all tokens end to end, without padding.

The worker's side of the wire's StepPlan.

T tokens, S sequences, R sampled rows, P scored rows, G cache groups.
"""

from dataclasses import dataclass, fields
from enum import IntEnum

import torch

# Steps back to which a step may refer.
NUM_SHARED_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTables:
    """The block tables of one cache group.

    Padded with block 0; nothing is read past a sequence's length. Blocks behind the group's window
    may be left out.
    """

    block_ids: torch.Tensor  # [S, max_blocks] int32
    first_blocks: torch.Tensor  # [S] int32, place in its sequence of the first block of each row


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """One value for each sequence, or for each sampled row."""

    temperature: torch.Tensor  # [S] float32, 0 is greedy
    top_k: torch.Tensor  # [S] int32, 0 keeps all
    top_p: torch.Tensor  # [S] float32, 1 keeps all
    min_p: torch.Tensor  # [S] float32, 0 keeps all
    seed: torch.Tensor  # [S] int64, the bits of the unsigned seed
    min_length: torch.Tensor  # [S] int32, a token at a position below it doesn't end its sequence
    presence_penalty: torch.Tensor  # [S] float32, 0 changes nothing
    frequency_penalty: torch.Tensor  # [S] float32, 0 changes nothing
    repetition_penalty: torch.Tensor  # [S] float32, 1 changes nothing
    num_logprobs: torch.Tensor  # [S] int32, most probable tokens to tell; -1 tells nothing

    def take(self, index: torch.Tensor) -> "SamplingColumns":
        """The values at `index`."""
        if index.equal(torch.arange(len(self.seed))):
            return self
        return SamplingColumns(
            **{each.name: getattr(self, each.name)[index] for each in fields(self)}
        )


class MaskKind(IntEnum):
    """What the words of a row's mask are; the numbers are those of the wire."""

    ALLOWED = 1  # token ids
    FORBIDDEN = 2  # token ids
    BITS = 3  # bit i of word w is set: token 32 w + i is allowed; ceil(V / 32) words


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBiases:
    """Added to logits, N of them; no token twice in a row."""

    rows: torch.Tensor  # [N] int64, of R, rising
    token_ids: torch.Tensor  # [N] int64
    values: torch.Tensor  # [N] float32, -inf forbids the token


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMasks:
    """Which tokens M rows may sample."""

    rows: torch.Tensor  # [M] int64, of R, rising, all different
    kinds: torch.Tensor  # [M] uint8, MaskKind
    num_words: torch.Tensor  # [M] int64
    words: torch.Tensor  # [sum(num_words)] int32


NO_MASKS = TokenMasks(
    rows=torch.zeros(0, dtype=torch.int64),
    kinds=torch.zeros(0, dtype=torch.uint8),
    num_words=torch.zeros(0, dtype=torch.int64),
    words=torch.zeros(0, dtype=torch.int32),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadWords:
    """W sequences of 2 tokens or more, whose last one isn't sampled after those before it."""

    rows: torch.Tensor  # [W] int64, of R, rising; a row may have several
    lengths: torch.Tensor  # [W] int64
    token_ids: torch.Tensor  # [sum(lengths)] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """What H rows have before the token to be sampled, as far as it matters.

    Their last tokens, enough for BadWords; all of the output where a penalty needs it; and in front
    of them the prompt's ids, each once, where a penalty needs those.
    """

    rows: torch.Tensor  # [H] int64, of R, rising, all different
    lengths: torch.Tensor  # [H] int64
    num_prompt_tokens: torch.Tensor  # [H] int64, how many of them, from the front, are prompt
    token_ids: torch.Tensor  # [sum(lengths)] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInputs:
    """What sampling needs beyond the columns, on the sampler's rank; each may have no rows."""

    biases: TokenBiases
    masks: TokenMasks
    bad_words: BadWords
    history: TokenHistory


_NONE = torch.zeros(0, dtype=torch.int64)
NO_INPUTS = SamplerInputs(
    biases=TokenBiases(rows=_NONE, token_ids=_NONE, values=torch.zeros(0)),
    masks=NO_MASKS,
    bad_words=BadWords(rows=_NONE, lengths=_NONE, token_ids=_NONE),
    history=TokenHistory(rows=_NONE, lengths=_NONE, num_prompt_tokens=_NONE, token_ids=_NONE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateInputs:
    """What a step that defers sampling has waited for; a token must be allowed by both masks."""

    inputs: SamplerInputs
    masks: TokenMasks


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReferences:
    """K tokens fed that earlier steps sample: each is a sample of one of them."""

    rows: torch.Tensor  # [K] int64, of T, rising
    step_ids: torch.Tensor  # [K] int64
    sample_rows: torch.Tensor  # [K] int64, index into the R of that step


NO_REFERENCES = TokenReferences(rows=_NONE, step_ids=_NONE, sample_rows=_NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """CPU tensors, as decoded; the executor moves what its device needs."""

    input_ids: torch.Tensor  # [T] int32
    positions: torch.Tensor  # [T] int32, index of each token in its own sequence
    sequence_ids: tuple[int, ...]  # [S]
    seq_lens: torch.Tensor  # [S] int32, tokens in the cache before the step
    query_lens: torch.Tensor  # [S] int32, tokens fed; they sum to T
    block_tables: tuple[BlockTables, ...]  # [G]
    block_copies: torch.Tensor  # [K, 2] int32, source and target, copied in order before the step
    sample_index: torch.Tensor  # [R] int32, rows of T whose next token is sampled
    sample_sequence: torch.Tensor  # [R] int32, index into S
    sampling: SamplingColumns  # [S]
    sampler_inputs: SamplerInputs
    defers_sampling: bool  # masks come later, and sampling waits for them
    score_index: torch.Tensor  # [P] int32, rows of T for whose logits a logprob is wanted
    score_token_ids: torch.Tensor  # [P] int32, of which token
    score_num_tops: torch.Tensor  # [P] int32, most probable tokens to tell beside it
    step_id: int = 0
    references: TokenReferences = NO_REFERENCES  # instead of what input_ids has there
    shares_samples: bool = False  # later steps may refer to its samples
