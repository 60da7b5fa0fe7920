"""The most probable tokens of rows, without sorting them."""

import numpy as np
import torch

from workers.sampling.masses import Bounds
from workers.sampling.segments import NEVER, SEGMENT, SegmentedRows, pieces


def bounds_of_best(rows: SegmentedRows, index: torch.Tensor, counts: torch.Tensor) -> Bounds:
    """Where each row's `counts` best tokens end, of equals those with the lower ids.

    index [n] into `rows`, counts [n] int64 from 1 to V -> bounds [n], which admit as many tokens
    or, where fewer can be drawn, all.
    """
    values = rows.values.new_full((len(index),), NEVER)
    ids = torch.full_like(index, rows.vocab_size)
    for place, (row, count) in enumerate(zip(index.tolist(), counts.tolist(), strict=True)):
        tokens = rows.values[row]
        value = _kth_largest(tokens, count)
        if value == NEVER:
            continue
        # As floats bools are added many times as fast, and up to 2^24 of them exactly.
        num_above = int(torch.gt(tokens, value, out=torch.empty_like(tokens)).sum())
        equal = (tokens == value).nonzero().flatten()
        values[place], ids[place] = value, equal[count - num_above - 1] + 1
    return Bounds(values, ids)


def _kth_largest(values: torch.Tensor, count: int) -> float:
    """Of values [V] the one that `count` - 1 others precede."""
    if values.device.type != "cpu":
        return float(values.topk(count, sorted=False).values.min())
    place = len(values) - count
    return float(np.partition(values.numpy(), place)[place])  # torch's takes ten times as long


def most_probable(
    rows: SegmentedRows, index: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's `counts` largest values in falling order, equals by rising id.

    index [n] into `rows`, counts [n] int64 from 0 to V -> ids [n, C] int64, values [n, C] padded
    with -inf, C the largest count.
    """
    width = int(counts.max()) if len(counts) else 0
    ids = index.new_zeros(len(index), width)
    values = rows.values.new_full((len(index), width), NEVER)
    if width == 0:
        return ids, values
    num_segments = rows.maxima.shape[1]
    narrow = width <= num_segments
    size = width * SEGMENT if narrow else rows.vocab_size
    for piece in pieces(len(index), size, index.device):
        find = _candidates_narrow if narrow else _candidates_wide
        place, token_ids, found = find(rows, index[piece], counts[piece], width)
        ids[piece], values[piece] = _ordered(place, token_ids, found, counts[piece], width)
    return ids, values


Candidates = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # place in n, id, value: [N] each


def _candidates_narrow(
    rows: SegmentedRows, index: torch.Tensor, counts: torch.Tensor, width: int
) -> Candidates:
    """The k best tokens are in the k segments with the largest maxima, and at least the kth."""
    maxima = rows.maxima[index]
    bounds = _bounds(maxima.topk(width, dim=-1).values, counts)
    equal = maxima == bounds[:, None]
    first = equal.cumsum(dim=-1) <= counts[:, None]  # a later segment has no lower ids
    place, segment = ((maxima > bounds[:, None]) | (equal & first)).nonzero(as_tuple=True)
    taken = rows.take(index[place], segment)
    which, offset = (taken >= bounds[place, None]).nonzero(as_tuple=True)
    found, place = taken[which, offset], place[which]
    ids = segment[which] * SEGMENT + offset
    return _without_spare_equals(place, ids, found, bounds, counts)


def _candidates_wide(
    rows: SegmentedRows, index: torch.Tensor, counts: torch.Tensor, width: int
) -> Candidates:
    taken = rows.values[index]
    bounds = _bounds(taken.topk(width, dim=-1).values, counts)
    place, ids = (taken >= bounds[:, None]).nonzero(as_tuple=True)
    return _without_spare_equals(place, ids, taken[place, ids], bounds, counts)


def _bounds(falling: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[n, m] values in falling order -> [n], the one at each row's count."""
    bounds = falling.gather(1, (counts[:, None] - 1).clamp(min=0)).flatten()
    bounds = bounds.clamp(min=torch.finfo(bounds.dtype).min)  # -inf is no candidate
    return bounds.masked_fill(counts == 0, float("inf"))


def _without_spare_equals(
    place: torch.Tensor,
    ids: torch.Tensor,
    found: torch.Tensor,
    bounds: torch.Tensor,
    counts: torch.Tensor,
) -> Candidates:
    """Of the tokens that equal the bound the first `counts` are enough."""
    equal = (found == bounds[place]).long()
    rank = equal.cumsum(0)  # among the equals of all rows
    per_row = torch.zeros_like(counts).index_add_(0, place, equal)
    rank -= (per_row.cumsum(0) - per_row)[place]
    kept = (equal == 0) | (rank <= counts[place])
    return place[kept], ids[kept], found[kept]


def _ordered(
    place: torch.Tensor, ids: torch.Tensor, found: torch.Tensor, counts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates, by rising place and id -> ids and values [n, width]."""
    per_row = torch.bincount(place, minlength=len(counts))
    column = torch.arange(len(place), device=place.device)
    column -= (per_row.cumsum(0) - per_row)[place]
    most = max(int(per_row.max()), width)
    packed = found.new_full((len(counts), most), NEVER)
    packed[place, column] = found
    packed_ids = ids.new_zeros(len(counts), most)
    packed_ids[place, column] = ids
    values, order = packed.sort(dim=-1, descending=True, stable=True)
    beyond = torch.arange(width, device=place.device) >= counts[:, None]
    return packed_ids.gather(1, order[:, :width]), values[:, :width].masked_fill(beyond, NEVER)
