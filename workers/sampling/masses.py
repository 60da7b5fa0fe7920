"""How much probability segments of rows have."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from workers.sampling import segments
from workers.sampling.segments import NEVER, SEGMENT, SegmentedRows, pieces

LOG2_E = 1 / math.log(2)
FLOAT32 = torch.finfo(torch.float32)
LEAST, LARGEST, TINIEST = FLOAT32.min, FLOAT32.max, FLOAT32.tiny
TORCH_GRAIN = 1 << 15  # elements that torch gives to a thread at least


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of each of n rows, where its more probable tokens end: this token is the first left out.

    More probable is a larger value or, of equals, a lower id. A value of -inf leaves none out that
    can be drawn.
    """

    values: torch.Tensor  # [n] float32
    ids: torch.Tensor  # [n] int64

    def take(self, index: torch.Tensor) -> "Bounds":
        return Bounds(self.values[index], self.ids[index])

    def admits(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Tokens [n, m] -> [n, m] bool, whether they are more probable."""
        bound = self.values[:, None]
        return (values > bound) | ((values == bound) & (ids < self.ids[:, None]))


@dataclass(frozen=True, slots=True)
class Scale:
    """What makes the logits of n rows scaled ones: 0 for the best token, less for the others."""

    best: torch.Tensor  # [n] float32
    temperature: torch.Tensor  # [n] float32, all more than 0

    def take(self, index: torch.Tensor | slice) -> "Scale":
        return Scale(self.best[index], self.temperature[index])

    def apply_(self, values: torch.Tensor) -> torch.Tensor:
        """[n, m] in place. The best is subtracted first: no temperature overflows it."""
        return values.sub_(self.best[:, None]).div_(self.temperature[:, None])

    def factors(self) -> torch.Tensor:
        """Of what is above the best, for powers of 2: exp2 is several times as fast as exp."""
        return (LOG2_E / self.temperature).clamp_(TINIEST, LARGEST)


def segment_masses(
    rows: SegmentedRows, index: torch.Tensor, scale: Scale, bounds: Bounds | None = None
) -> torch.Tensor:
    """Sums of exp(scaled) over each segment's tokens within `bounds`.

    index [n] into `rows` -> [n, S] float32; without `bounds` over all tokens.
    """
    maxima = rows.maxima[index]
    masses = torch.zeros_like(maxima)
    if not rows.is_on_host:
        _set_all(masses, rows, index, scale, bounds)
        return masses
    if bounds is None:
        limits = None
        live = maxima >= LEAST  # -inf adds nothing
    else:
        limits = _limits(bounds, maxima.shape[1])
        live = maxima >= bounds.values.clamp(min=LEAST)[:, None]
    # Most segments of a row are copied faster than they are picked.
    whole = (live.sum(dim=-1) * 2 > live.shape[1]).nonzero().flatten()
    num_full = rows.num_full_segments
    if len(whole) and num_full:
        _add_whole_rows(masses, rows, index, scale, limits, whole)
        live[whole, :num_full] = False
    _add_segments(masses, rows, index, scale, limits, live)
    if bounds is not None:
        _add_equals(masses, rows, index, scale, bounds)
    return masses


def _set_all(
    masses: torch.Tensor,
    rows: SegmentedRows,
    index: torch.Tensor,
    scale: Scale,
    bounds: Bounds | None,
) -> None:
    """Sets all masses [n, S], without a look at which segments have any."""
    num_full = rows.num_full_segments
    factors = scale.factors()
    limits = None if bounds is None else _limits(bounds, masses.shape[1])
    for piece in pieces(len(index), masses.shape[1] * SEGMENT, masses.device):
        here = index[piece]
        parts = [(slice(0, num_full), rows.take_full(here))]
        tail = rows.take_tail(here)
        if tail is not None:
            parts.append((slice(num_full, num_full + 1), tail[:, None]))
        for part, values in parts:
            within = None if limits is None else _above(values, limits[piece, part, None])
            best, factor = scale.best[piece, None, None], factors[piece, None, None]
            values.sub_(best).mul_(factor).exp2_()
            if within is not None:
                values.mul_(within)
            masses[piece, part] = values.sum(dim=-1)
    if bounds is not None:
        _add_equals(masses, rows, index, scale, bounds)


def _add_whole_rows(
    masses: torch.Tensor,
    rows: SegmentedRows,
    index: torch.Tensor,
    scale: Scale,
    limits: torch.Tensor | None,
    whole: torch.Tensor,
) -> None:
    """Sets the masses [n, S] of the full segments of the rows `whole` [m] of n."""
    num_full, device = rows.num_full_segments, masses.device
    factors = scale.factors()
    space = masses.new_zeros(0)
    for piece in pieces(len(whole), num_full * SEGMENT, device):
        here = whole[piece]
        count = len(here) * num_full
        if len(space) < count:
            space = masses.new_zeros(whole_grains(count, device), SEGMENT)
        values = space[:count].view(len(here), num_full, SEGMENT)
        rows.take_full(index[here], values)
        within = None if limits is None else _above(values, limits[here, :num_full, None])
        values.sub_(scale.best[here, None, None]).mul_(factors[here, None, None])
        space.exp2_()
        if within is not None:
            values.mul_(within)
        masses[here, :num_full] = values.sum(dim=-1)


def _add_segments(
    masses: torch.Tensor,
    rows: SegmentedRows,
    index: torch.Tensor,
    scale: Scale,
    limits: torch.Tensor | None,
    live: torch.Tensor,
) -> None:
    """Sets the masses [n, S] of the segments that are `live` [n, S]."""
    factors = scale.factors()
    places, numbers = live.nonzero(as_tuple=True)
    for piece in _segment_pieces(len(places), masses.device):
        here, segment = places[piece], numbers[piece]
        values = rows.take(index[here], segment)
        within = None if limits is None else _above(values, limits[here, segment, None])
        values.sub_(scale.best[here, None]).mul_(factors[here, None]).exp2_()
        if within is not None:
            values.mul_(within)
        masses[here, segment] = values.sum(dim=-1)


def _add_equals(
    masses: torch.Tensor, rows: SegmentedRows, index: torch.Tensor, scale: Scale, bounds: Bounds
) -> None:
    """Adds the tokens that equal the bound and precede it in its own segment."""
    own = (bounds.ids // SEGMENT).clamp(max=masses.shape[1] - 1)
    ids = own[:, None] * SEGMENT + torch.arange(SEGMENT, device=own.device)
    equal = (rows.take(index, own) == bounds.values[:, None]) & (ids < bounds.ids[:, None])
    # A bound behind its last token has no own segment: there all were counted already.
    counted = (own + 1) * SEGMENT <= bounds.ids
    number = equal.sum(dim=-1).masked_fill(counted, 0)
    each = scale.apply_(bounds.values.clone()[:, None]).exp_().flatten()
    places = torch.arange(len(own), device=own.device)
    masses[places, own] += torch.where(number > 0, number * each, 0)


def _limits(bounds: Bounds, num_segments: int) -> torch.Tensor:
    """[n, S]: what tokens must be above to be within the bounds [n].

    In a segment that lies before the bound's id, tokens that equal the bound are within it, too.
    """
    ends = torch.arange(1, num_segments + 1, device=bounds.ids.device) * SEGMENT
    below = bounds.values.nextafter(torch.full_like(bounds.values, NEVER))
    return torch.where(ends <= bounds.ids[:, None], below[:, None], bounds.values[:, None])


def _above(values: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """1 or 0 as floats: multiplying by them is faster than choosing by bools."""
    return torch.gt(values, limits, out=torch.empty_like(values))


def whole_grains(count: int, device: torch.device) -> int:
    """`count` segments, or a few more: so many that each of torch's threads gets whole grains.

    torch splits what it computes into grains, or evenly among its threads, and exp2 has other last
    bits at the end of a part that is no multiple of a vector: a row would depend on its mates.
    """
    if device.type != "cpu":
        return count
    grain = TORCH_GRAIN // SEGMENT
    share = grain * torch.get_num_threads()
    return count + -count % (grain if count <= share else share)


def _segment_pieces(count: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Indices of `count` segments in pieces of whole grains; the last may be repeated."""
    at_once = segments.CPU_PIECE if device.type == "cpu" else segments.GPU_PIECE
    step = whole_grains(max(1, at_once // SEGMENT), device)
    for start in range(0, count, step):
        size = whole_grains(min(step, count - start), device)
        yield torch.arange(start, start + size, device=device).clamp_(max=count - 1)
