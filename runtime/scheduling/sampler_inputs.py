"""What sampling needs beyond one value per sequence, for the sampled rows that need it.

Rows are indices into R, the step's sampled rows; of one kind of input they rise. Goes to the
sampler's rank alone.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from runtime.scheduling.token_masks import TokenMasks, no_masks

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBiases:
    """Added to logits, N of them; no token twice in a row."""

    rows: Int32  # [N]
    token_ids: Int32  # [N]
    values: Float32  # [N] -inf forbids the token


@dataclass(frozen=True, slots=True, kw_only=True)
class BadWords:
    """W sequences of 2 tokens or more, whose last one isn't sampled after those before it."""

    rows: Int32  # [W] a row may have several
    lengths: Int32  # [W]
    token_ids: Int32  # [sum(lengths)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """What H rows have before the token to be sampled, as far as it matters.

    Their last tokens, enough for BadWords; all of the output where a penalty needs it; and in front
    of them the prompt's ids, each once, where a penalty needs those.
    """

    rows: Int32  # [H] all different
    lengths: Int32  # [H]
    num_prompt_tokens: Int32  # [H] how many of them, from the front, are of the prompt
    token_ids: Int32  # [sum(lengths)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerInputs:
    """Each may have no rows."""

    biases: TokenBiases
    masks: TokenMasks
    bad_words: BadWords
    history: TokenHistory


@cache
def no_inputs() -> SamplerInputs:
    """For a step in which no row needs any."""
    ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return SamplerInputs(
        biases=TokenBiases(rows=ints, token_ids=ints, values=floats),
        masks=no_masks(),
        bad_words=BadWords(rows=ints, lengths=ints, token_ids=ints),
        history=TokenHistory(rows=ints, lengths=ints, num_prompt_tokens=ints, token_ids=ints),
    )
