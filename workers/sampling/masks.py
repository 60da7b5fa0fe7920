"""Masks over the whole vocabulary."""

import torch

from workers.batch import MaskKind, TokenMasks
from workers.staging import upload

WORD_BITS = 32
ALLOWS, FORBIDS = float("inf"), float("-inf")  # ceilings of a token's logit
# Of each byte of a mask the ceilings of its eight tokens: [256, 8] float32.
BYTE_CEILINGS = torch.where(
    (torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 1, ALLOWS, FORBIDS
)


def dense_rows(masks: TokenMasks) -> torch.Tensor:
    """The rows, rising, whose masks may forbid most of the vocabulary."""
    return masks.rows[masks.kinds != MaskKind.FORBIDDEN]


def forbidden_pairs(masks: TokenMasks) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and token ids that masks of the kind FORBIDDEN name; [n] int64 each."""
    return _entries(masks, masks.kinds == MaskKind.FORBIDDEN)


def ceilings(
    masks: TokenMasks, rows: torch.Tensor, vocab_size: int, device: torch.device
) -> torch.Tensor | None:
    """What no logit of the rows [n], rising, may exceed: inf, or -inf where a dense mask forbids.

    [n, V] float32; None where no dense mask is for these rows.
    """
    place = torch.searchsorted(rows, masks.rows).clamp_(max=len(rows) - 1)
    here = rows[place] == masks.rows
    allowing = here & (masks.kinds == MaskKind.ALLOWED)
    with_bits = here & (masks.kinds == MaskKind.BITS)
    num_allowing, num_with_bits = int(allowing.sum()), int(with_bits.sum())
    if num_with_bits == len(rows):
        return _bit_ceilings(masks, with_bits, vocab_size, device)
    if num_allowing + num_with_bits == 0:
        return None
    result = torch.full((len(rows), vocab_size), ALLOWS, device=device)
    if num_allowing:
        result[upload(place[allowing], device)] = FORBIDS
        word_rows, ids = _entries(masks, allowing)
        result[upload(torch.searchsorted(rows, word_rows), device), upload(ids, device)] = ALLOWS
    if num_with_bits:
        bits = _bit_ceilings(masks, with_bits, vocab_size, device)
        result[upload(place[with_bits], device)] = bits
    return result


def _bit_ceilings(
    masks: TokenMasks, chosen: torch.Tensor, vocab_size: int, device: torch.device
) -> torch.Tensor:
    starts = (masks.num_words.cumsum(0) - masks.num_words)[chosen]
    words = masks.words[starts[:, None] + torch.arange(-(-vocab_size // WORD_BITS))]
    octets = upload(words.view(torch.uint8), device)
    looked_up = upload(BYTE_CEILINGS, device).index_select(0, octets.flatten().int())
    return looked_up.view(len(words), -1)[:, :vocab_size]


def _entries(masks: TokenMasks, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and words, end to end, of the masks `chosen` [M] bool; [n] int64 each."""
    of_word = torch.repeat_interleave(masks.num_words)
    words = chosen[of_word]
    return masks.rows[of_word[words]], masks.words[words].long()
