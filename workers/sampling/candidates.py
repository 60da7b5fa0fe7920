"""The most probable tokens of rows, without sorting them."""

import numpy as np
import torch

from workers.sampling.masses import Bounds
from workers.sampling.segments import NEVER, SEGMENT, SegmentedRows, pieces


def bounds_of_best(
    rows: SegmentedRows, index: torch.Tensor, counts: torch.Tensor, width: int | None = None
) -> Bounds:
    """Where each row's `counts` best tokens end, of equals those with the lower ids.

    index [n] into `rows`, counts [n] int64 from 1 to V -> bounds [n], which admit as many tokens
    or, where fewer can be drawn, all. `width` is the largest count, for a device.
    """
    if not rows.is_on_host:
        assert width is not None, "the largest count would have to be read"
        return _bounds_there(rows, index, counts, width)
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
    place = len(values) - count
    return float(np.partition(values.numpy(), place)[place])  # torch's takes ten times as long


def _bounds_there(
    rows: SegmentedRows, index: torch.Tensor, counts: torch.Tensor, width: int
) -> Bounds:
    """As bounds_of_best, nothing read; a count of 0 leaves none out."""
    found, ids = rows.values.new_empty(len(index)), torch.empty_like(index)
    last = (counts - 1).clamp(min=0)[:, None]
    for piece in pieces(len(index), rows.vocab_size, index.device):
        taken = rows.values[index[piece]]
        order = rank_keys(taken).topk(width, dim=-1).indices.gather(1, last[piece]).flatten()
        found[piece], ids[piece] = taken.gather(1, order[:, None]).flatten(), order + 1
    found.masked_fill_(counts == 0, NEVER)
    return Bounds(found, ids.masked_fill_(found == NEVER, rows.vocab_size))


def rank_keys(values: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
    """[n, m] int64, all different: larger for a larger value and, of equals, for a lower id.

    ids [n, m] int64 less than 2^32, where they aren't the columns.
    """
    if ids is None:
        ids = torch.arange(values.shape[1], device=values.device)
    bits = (values + 0.0).view(torch.int32)  # one zero instead of two
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the numbers
    return (rising.long() << 32) + (0xFFFFFFFF - ids)


def most_probable(
    rows: SegmentedRows, index: torch.Tensor, counts: torch.Tensor, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's `counts` largest values in falling order, equals by rising id.

    index [n] into `rows`, counts [n] int64 from 0 to V -> ids [n, C] int64, values [n, C] padded
    with -inf, C the largest count: `width`, where it is known.
    """
    if width is None:
        width = int(counts.max()) if len(counts) else 0
    ids = index.new_zeros(len(index), width)
    values = rows.values.new_full((len(index), width), NEVER)
    if width == 0:
        return ids, values
    num_segments = rows.maxima.shape[1]
    narrow = width <= num_segments
    size = width * SEGMENT if narrow else rows.vocab_size
    for piece in pieces(len(index), size, index.device):
        if not rows.is_on_host:
            found_there = _best_there(rows, index[piece], counts[piece], width)
            ids[piece], values[piece] = found_there
            continue
        find = _candidates_narrow if narrow else _candidates_wide
        place, token_ids, found = find(rows, index[piece], counts[piece], width)
        ids[piece], values[piece] = _ordered(place, token_ids, found, counts[piece], width)
    return ids, values


def _best_there(
    rows: SegmentedRows, index: torch.Tensor, counts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As most_probable, nothing read."""
    num_segments = rows.maxima.shape[1]
    if width <= num_segments:
        # In as many segments as tokens are wanted; of segments with equal maxima the first.
        chosen = rank_keys(rows.maxima[index]).topk(width, dim=-1).indices
        taken = rows.take(index.repeat_interleave(width), chosen.flatten()).view(len(index), -1)
        offsets = torch.arange(SEGMENT, device=index.device)
        all_ids = (chosen[:, :, None] * SEGMENT + offsets).view(len(index), -1)
    else:
        taken = rows.values[index]
        all_ids = torch.arange(rows.vocab_size, device=index.device).expand(len(index), -1)
    order = rank_keys(taken, all_ids).topk(width, dim=-1).indices
    values = taken.gather(1, order)
    beyond = torch.arange(width, device=index.device) >= counts[:, None]
    values.masked_fill_(beyond, NEVER)
    return all_ids.gather(1, order).masked_fill_(values == NEVER, 0), values


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
