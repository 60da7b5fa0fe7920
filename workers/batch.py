"""One flattened step as a rank sees it: all tokens end to end, without padding.

The worker's side of the wire's StepPlan.

T tokens, S sequences, R sampled rows, G cache groups.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTables:
    """The block tables of one cache group.

    Padded with block 0; nothing is read past a sequence's length. Blocks behind the group's window
    may be left out.
    """

    block_ids: torch.Tensor  # [S, max_blocks] int32
    first_blocks: torch.Tensor  # [S] int32, place in its sequence of the first block of each row


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
    temperature: torch.Tensor  # [S] float32, 0 is greedy
    top_k: torch.Tensor  # [S] int32, 0 keeps all
    top_p: torch.Tensor  # [S] float32
    seed: torch.Tensor  # [S] int64, the bits of the unsigned seed
    min_length: torch.Tensor  # [S] int32, a token at a position below it doesn't end its sequence
