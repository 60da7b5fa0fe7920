"""Attention by the formula, over all tokens of one sequence: what paged attention must equal."""

import torch


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Query [L, Hq, K], key [L, H, K], value [L, H, V] -> [L, Hq, V].

    Every query sees the keys up to its own place.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(len(query))
    hidden = place[:, None] < place
    if window:
        hidden |= place[:, None] - place >= window
    if chunk:
        hidden |= place[:, None] // chunk != place // chunk
    masses = scores.exp().masked_fill(hidden, 0.0)
    total = masses.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", masses / total, value)
