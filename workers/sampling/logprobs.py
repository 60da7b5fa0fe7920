"""Logarithms of the probabilities before any parameter."""

from dataclasses import dataclass

import torch

from workers.sampling.candidates import most_probable
from workers.sampling.masses import Scale, segment_masses
from workers.sampling.segments import SegmentedRows
from workers.staging import upload_together

IMPOSSIBLE = -9999.0  # stands for -inf, which nobody can parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Of K tokens, and of the most probable tokens beside each."""

    rows: torch.Tensor  # [K] int64
    logprobs: torch.Tensor  # [K] float32, -9999 for a probability of 0, NaN for damaged logits
    num_tops: torch.Tensor  # [K] int64, as many as were asked for, less those of probability 0
    top_token_ids: torch.Tensor  # [K, n] int64, the best first, equals by rising id
    top_logprobs: torch.Tensor  # [K, n] float32, -inf beyond num_tops


NO_LOGPROBS = Logprobs(
    rows=torch.zeros(0, dtype=torch.int64),
    logprobs=torch.zeros(0),
    num_tops=torch.zeros(0, dtype=torch.int64),
    top_token_ids=torch.zeros(0, 0, dtype=torch.int64),
    top_logprobs=torch.zeros(0, 0),
)


def compute_logprobs(
    rows: SegmentedRows, index: torch.Tensor, token_ids: torch.Tensor, num_tops: torch.Tensor
) -> Logprobs:
    """Of one token [K] of each of the rows index [K]; all three on the CPU, and so is the result.

    Of a row with damaged logits the token's is NaN, and there are no others.
    """
    device = rows.values.device
    if len(index) == 0:
        return NO_LOGPROBS
    width = int(num_tops.max().clamp(max=rows.vocab_size))
    here, tokens, counts = upload_together((index, token_ids, num_tops), device)
    best = rows.best[here]
    sound = best.isfinite()
    scale = Scale(best.masked_fill(~sound, 0), torch.ones_like(best))
    total = segment_masses(rows, here, scale).double().sum(dim=-1)
    normalizer = best.double() + total.log()

    own = (rows.values[here, tokens].double() - normalizer).float()
    counts = counts.clamp(max=rows.vocab_size)
    top_ids, top_values = most_probable(rows, here, counts, width)
    tops = (top_values.double() - normalizer[:, None]).float()
    tops.masked_fill_(~sound[:, None], float("-inf"))
    return Logprobs(
        rows=index,
        logprobs=own.masked_fill_(~own.isfinite(), IMPOSSIBLE)
        .masked_fill_(~sound, float("nan"))
        .cpu(),
        num_tops=(tops > float("-inf")).sum(dim=-1).cpu(),
        top_token_ids=top_ids.cpu(),
        top_logprobs=tops.cpu(),
    )
