"""Draws a token of each row by Gumbel-max (Maddison et al.: A* Sampling)."""

from dataclasses import dataclass

import torch

from workers.sampling.candidates import bounds_of_best, most_probable
from workers.sampling.masses import Bounds, Scale, segment_masses
from workers.sampling.noise import gumbel
from workers.sampling.segments import NEVER, SEGMENT, SegmentedRows

# Domains of the noise. Each attempt at a row has two of its own, the first attempt these.
TOKEN_DOMAIN = 0
SEGMENT_DOMAIN = 1
DOMAINS_PER_ATTEMPT = 2
# Each attempt leaves at most a uniform part of the mass, and never less than the best token, which
# is kept and has at least 1/V of it. So more than n attempts are as likely as at least n events
# where ln(V) are expected: for n of 128 and ln(V) of 13 (V is 262,144) less than 10^-75.
MAX_ATTEMPTS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """n rows to draw from, and what each asks for."""

    rows: SegmentedRows
    index: torch.Tensor  # [n] int64, into `rows`
    scale: Scale  # [n]
    top_k: torch.Tensor  # [n] int64, 0 keeps all
    top_p: torch.Tensor  # [n] float64
    cutoff: torch.Tensor  # [n] float32, by min-p: logits below it aren't drawn
    keys: torch.Tensor  # [n] int64, of the noise
    # What the host knows of them.
    widest: int = 0  # the largest top_k; 0: none keeps less than all
    bounded: bool = True  # top-k, or min-p alone, leaves tokens out of some rows

    def take(self, index: torch.Tensor | slice) -> "Draws":
        return Draws(
            rows=self.rows,
            index=self.index[index],
            scale=self.scale.take(index),
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            cutoff=self.cutoff[index],
            keys=self.keys[index],
            widest=self.widest,
            bounded=self.bounded,
        )

    def mass_limits(self, totals: torch.Tensor) -> torch.Tensor:
        """Tokens are kept while those more probable have less mass than this; [n] float64."""
        limits = (totals * self.top_p).clamp(min=torch.finfo(torch.float64).tiny)
        limits.masked_fill_(self.top_p >= 1, float("inf"))
        return limits


def draw_greedy(rows: SegmentedRows, index: torch.Tensor) -> torch.Tensor:
    """The best token of each row, of equals the one with the lowest id; [n] -> [n]."""
    segments = rows.maxima[index].argmax(dim=-1)
    return segments * SEGMENT + rows.take(index, segments).argmax(dim=-1)


def draw_of_best(draws: Draws) -> torch.Tensor:
    """Rows with a top-k: one of the k best tokens, less what top-p and min-p cut; [n]."""
    ids, values = most_probable(draws.rows, draws.index, draws.top_k, draws.widest)
    kept = kept_of_best(draws, values)
    scores = draws.scale.apply_(values) + gumbel(draws.keys, TOKEN_DOMAIN, ids)
    return ids.gather(1, scores.masked_fill_(~kept, NEVER).argmax(dim=-1, keepdim=True)).flatten()


def kept_of_best(draws: Draws, values: torch.Tensor) -> torch.Tensor:
    """Which of each row's best values [n, C], in falling order, top-p and min-p keep."""
    mass = draws.scale.apply_(values.clone()).double().exp_().cumsum(dim=-1)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    return (before < draws.mass_limits(mass[:, -1])[:, None]) & (values >= draws.cutoff[:, None])


class Narrowing:
    """Draws from all tokens, then, where top-p or min-p refuse one, from those more probable.

    Rows with a top-k start with its tokens instead of all. What top-p keeps is among them, so the
    draw that is kept at last has the truncated distribution exactly. Each attempt is in two levels:
    a segment by its mass, a token in it. A refusal leaves less than the part of the mass above a
    random token: attempts grow with the logarithm of what top-p keeps, on flat rows as on peaked
    ones.
    """

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self.start = _start(draws)
        self._masses = _masses_within(draws, self.start)
        self._limits = draws.mass_limits(self._masses.double().sum(dim=-1))

    def draw_once(self) -> torch.Tensor:
        """Token ids [n], where no row has a top-p: nothing refuses one."""
        everyone = torch.arange(len(self._draws.index), device=self._draws.index.device)
        return self._attempt(everyone, self._masses, self.start, 0).ids

    def draw(self) -> torch.Tensor:
        """Token ids [n]. Of a device one read an attempt: which rows refuse their token."""
        pending = torch.arange(len(self._draws.index), device=self._draws.index.device)
        tokens = torch.empty_like(pending)
        masses, bounds, attempt = self._masses, self.start, 0
        while len(pending):
            assert attempt < MAX_ATTEMPTS, f"{len(pending)} rows refuse all of {attempt} tokens"
            drawn = self._attempt(pending, masses, bounds, attempt)
            kept, masses = self.judge(pending, drawn)
            tokens[pending] = drawn.ids  # those that are refused, too: others replace them
            # Rows whose logits are damaged keep any.
            left = (~kept & self._draws.scale.best[pending].isfinite()).nonzero().flatten()
            pending, masses, bounds = pending[left], masses[left], drawn.take(left)
            attempt += 1
        return tokens

    def _attempt(
        self, pending: torch.Tensor, masses: torch.Tensor, bounds: Bounds, attempt: int
    ) -> Bounds:
        """One token of each row within its bounds, by the masses [n', S] of these."""
        draws = self._draws.take(pending)
        domain = attempt * DOMAINS_PER_ATTEMPT
        segment_ids = torch.arange(masses.shape[1], device=masses.device)
        noise = gumbel(draws.keys, domain + SEGMENT_DOMAIN, segment_ids)
        segments = noise.add_(masses.double().log_()).argmax(dim=-1)
        ids = segments[:, None] * SEGMENT + torch.arange(SEGMENT, device=masses.device)
        values = draws.rows.take(draws.index, segments)
        scores = gumbel(draws.keys, domain + TOKEN_DOMAIN, ids)
        scores += draws.scale.apply_(values.clone())
        scores.masked_fill_(~bounds.admits(values, ids), NEVER)
        best = scores.argmax(dim=-1, keepdim=True)
        return Bounds(values.gather(1, best).flatten(), ids.gather(1, best).flatten())

    def judge(self, pending: torch.Tensor, drawn: Bounds) -> tuple[torch.Tensor, torch.Tensor]:
        """Whether top-p and min-p keep the tokens drawn for rows [n'] of the draws.

        [n'] bool, and the masses [n', S] of the tokens more probable; zeros where nobody asks.
        """
        draws = self._draws.take(pending)
        if draws.rows.is_on_host:
            masses = self._masses.new_zeros(len(pending), self._masses.shape[1])
            asked = (draws.top_p < 1).nonzero().flatten()
            if len(asked):
                masses[asked] = segment_masses(
                    draws.rows, draws.index[asked], draws.scale.take(asked), drawn.take(asked)
                )
        else:
            masses = segment_masses(draws.rows, draws.index, draws.scale, drawn)
            masses.masked_fill_((draws.top_p >= 1)[:, None], 0)
        kept = masses.double().sum(dim=-1) < self._limits[pending]
        return kept & (drawn.values >= draws.cutoff), masses


def _start(draws: Draws) -> Bounds:
    """Behind what top-k keeps; behind min-p's cut, too, where no top-p needs the total."""
    vocab_size = draws.rows.vocab_size
    values = draws.cutoff.masked_fill(draws.top_p < 1, NEVER)
    ids = torch.full_like(draws.index, vocab_size)
    if draws.widest == 0:
        return Bounds(values, ids)
    if not draws.rows.is_on_host:
        best = bounds_of_best(draws.rows, draws.index, draws.top_k, draws.widest)
        first = best.values >= values
        ids, values = torch.where(first, best.ids, ids), torch.maximum(best.values, values)
        return Bounds(values, ids)
    cut = (draws.top_k > 0).nonzero().flatten()
    if len(cut):
        best = bounds_of_best(draws.rows, draws.index[cut], draws.top_k[cut])
        ids[cut] = torch.where(best.values >= values[cut], best.ids, ids[cut])
        values[cut] = torch.maximum(best.values, values[cut])
    return Bounds(values, ids)


def _masses_within(draws: Draws, bounds: Bounds) -> torch.Tensor:
    """[n, S]; where nothing is left out nothing is compared."""
    if not draws.bounded or not draws.rows.is_on_host:
        within = bounds if draws.bounded else None
        return segment_masses(draws.rows, draws.index, draws.scale, within)
    masses = draws.rows.maxima.new_empty(len(draws.index), draws.rows.maxima.shape[1])
    bounded = bounds.values > NEVER
    for chosen, within in ((bounded, bounds), (~bounded, None)):
        here = chosen.nonzero().flatten()
        if len(here):
            masses[here] = segment_masses(
                draws.rows,
                draws.index[here],
                draws.scale.take(here),
                None if within is None else within.take(here),
            )
    return masses
