"""From logits to tokens, on the sampler's rank.

A token is a function of its row's logits, parameters, seed and position alone: noise comes from a
counter-based hash, and which rule applies never depends on the other rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from workers.errors import WorkerError

SEGMENT = 512  # ids of a segment in the two-level draw
TWO_LEVEL_VOCABULARY = 4096  # vocabularies larger than this are drawn from in two levels
# Candidates that a top-p row looks at before it sorts its whole vocabulary.
NUCLEUS_GUESS = 1024

TOKEN_DOMAIN = 0
SEGMENT_DOMAIN = 1

NEVER = float("-inf")


def _signed(bits: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return bits - (1 << 64) if bits >> 63 else bits


# Constants of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
GAMMA = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """What each row asks for."""

    sequence_ids: tuple[int, ...]  # [R], to name a row in errors
    positions: torch.Tensor  # [R] int64, of the token to be sampled, in its sequence
    temperature: torch.Tensor  # [R] float32, 0 is greedy
    top_k: torch.Tensor  # [R] int32, 0 keeps all
    top_p: torch.Tensor  # [R] float32
    seed: torch.Tensor  # [R] int64, the bits of the unsigned seed
    min_length: torch.Tensor  # [R] int32, no end of sequence is sampled at a position below it


class Sampler:
    """Greedy, or temperature, top-k, top-p and Gumbel-max (Maddison et al.: A* Sampling)."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        """`eos_token_ids` end a sequence; they are ids of the vocabulary."""
        self._eos_token_ids = torch.tensor(eos_token_ids, dtype=torch.int64)

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Takes logits [R, V] float32, gives token ids [R] int64.

        Raises WorkerError: a row's logits are NaN or infinite.
        """
        best, tokens = logits.max(dim=-1)
        self._check_finite(best, rows.sequence_ids)
        device = logits.device
        held = rows.positions < rows.min_length
        if bool(held.any()):
            index = held.nonzero().flatten()
            here = index.to(device)
            best[here], tokens[here] = self._pick(logits, index, held).max(dim=-1)
            self._check_finite(best, rows.sequence_ids)
        vocabulary = logits.shape[-1]
        greedy = rows.temperature == 0
        cuts_k = (rows.top_k > 0) & (rows.top_k < vocabulary)
        filtered = ~greedy & (cuts_k | (rows.top_p < 1))
        free = ~greedy & ~filtered
        for chosen, draw in ((free, self._draw_free), (filtered, self._draw_filtered)):
            index = chosen.nonzero().flatten()
            if len(index) == 0:
                continue
            here = index.to(device)
            # The largest logit becomes 0, so that no temperature overflows it.
            scaled = self._pick(logits, index, held).sub_(best[here, None])
            scaled.div_(rows.temperature[index, None].to(device))
            keys = row_keys(rows.seed[index], rows.positions[index])
            top_k = torch.where(cuts_k, rows.top_k, vocabulary)[index]
            tokens[here] = draw(scaled, keys, top_k, rows.top_p[index])
        return tokens

    def _pick(self, logits: torch.Tensor, index: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """A copy of some rows [R', V], index [R']; those of `held` [R] without their ends."""
        picked = logits[index.to(logits.device)]
        holding = held[index].nonzero().to(logits.device)  # [n, 1]
        if len(holding):
            picked[holding, self._eos_token_ids.to(logits.device)] = NEVER
        return picked

    def _check_finite(self, best: torch.Tensor, sequence_ids: Sequence[int]) -> None:
        finite = best.isfinite().tolist()
        if not all(finite):
            row = finite.index(False)
            raise WorkerError(
                f"the largest logit of sequence {sequence_ids[row]} is {best[row].item()}: "
                "the model's numbers overflowed or its weights are damaged"
            )

    def _draw_free(
        self, scaled: torch.Tensor, keys: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
    ) -> torch.Tensor:
        """[R, V] -> [R], from the whole distribution."""
        num_rows, vocabulary = scaled.shape
        if vocabulary <= TWO_LEVEL_VOCABULARY:
            ids = torch.arange(vocabulary, device=scaled.device)
            return (scaled + gumbel(keys, TOKEN_DOMAIN, ids)).argmax(dim=-1)
        segments = split_segments(scaled)
        weights = segments.logsumexp(dim=-1)
        segment_ids = torch.arange(segments.shape[1], device=scaled.device)
        drawn = (weights + gumbel(keys, SEGMENT_DOMAIN, segment_ids)).argmax(dim=-1)
        within = segments[torch.arange(num_rows, device=scaled.device), drawn]
        ids = drawn[:, None] * SEGMENT + torch.arange(SEGMENT, device=scaled.device)
        chosen = (within + gumbel(keys, TOKEN_DOMAIN, ids)).argmax(dim=-1)
        return drawn * SEGMENT + chosen

    def _draw_filtered(
        self, scaled: torch.Tensor, keys: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
    ) -> torch.Tensor:
        """[R, V] -> [R], from each row's k most probable tokens, then its nucleus of them."""
        num_rows, vocabulary = scaled.shape
        device = scaled.device
        tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
        uncut = top_k == vocabulary
        guess = torch.where(uncut, min(NUCLEUS_GUESS, vocabulary), top_k)
        pending = torch.arange(num_rows)
        while len(pending):
            here = pending.to(device)
            ids, values = most_probable(scaled[here], guess[pending].to(device))
            mass = values.double().exp().cumsum(dim=-1)
            total = mass[:, -1].clone()
            if bool(uncut[pending].any()):
                whole = total_mass(scaled[here])
                total = torch.where(uncut[pending].to(device), whole, total)
            limit = (total * top_p[pending].double().to(device))[:, None]
            # A token is kept where the more probable ones don't reach the limit yet.
            kept = torch.cat((torch.zeros_like(limit), mass[:, :-1]), dim=-1) < limit
            noise = gumbel(keys[pending], TOKEN_DOMAIN, ids)
            scores = (values + noise).masked_fill(~kept, NEVER)
            drawn = ids.gather(1, scores.argmax(dim=-1, keepdim=True)).flatten()
            done = (mass[:, -1] >= limit[:, 0]).cpu() | (guess[pending] == top_k[pending])
            tokens[here[done.to(device)]] = drawn[done.to(device)]
            pending = pending[~done]
            guess = top_k
        return tokens


def split_segments(values: torch.Tensor) -> torch.Tensor:
    """[R, V] -> [R, segments, SEGMENT], padded with -inf."""
    padding = -values.shape[1] % SEGMENT
    return functional.pad(values, (0, padding), value=NEVER).view(len(values), -1, SEGMENT)


def total_mass(values: torch.Tensor) -> torch.Tensor:
    """Sums of exponentials [R] float64.

    By segments: torch adds up one long row in another order than several, and a row would depend
    on its batch mates in the last bits.
    """
    return split_segments(values).double().exp().sum(dim=-1).sum(dim=-1)


def most_probable(values: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's `counts` largest values in falling order, ties by rising id.

    values [R, V], counts [R] -> ids [R, C] int64, values [R, C] padded with -inf, C at most the
    largest count.
    """
    width = int(counts.max())
    bound = values.topk(width, dim=-1).values.gather(1, counts[:, None].long() - 1)
    bound = bound.clamp(min=torch.finfo(bound.dtype).min)  # forbidden tokens are no candidates
    # Everything that ties with the last place is a candidate; rows keep their ids rising.
    row, ids = (values >= bound).nonzero(as_tuple=True)
    per_row = torch.bincount(row, minlength=len(values))
    place = torch.arange(len(row), device=row.device) - (per_row.cumsum(0) - per_row)[row]
    most = int(per_row.max())
    width = min(width, most)
    packed = values.new_full((len(values), most), NEVER)
    packed[row, place] = values[row, ids]
    packed_ids = row.new_zeros(len(values), most)
    packed_ids[row, place] = ids
    ordered, order = packed.sort(dim=-1, descending=True, stable=True)
    beyond = torch.arange(width, device=row.device) >= counts[:, None]
    return packed_ids.gather(1, order[:, :width]), ordered[:, :width].masked_fill(beyond, NEVER)


def row_keys(seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[R] int64 keys of the rows' noise, from seeds and positions [R] int64."""
    return _mix(_mix(seed + GAMMA) ^ _mix(positions * GAMMA + MIX_1))


def gumbel(keys: torch.Tensor, domain: int, ids: torch.Tensor) -> torch.Tensor:
    """Gumbel noise [R, n] float64 of ids [n] or [R, n]: a function of (key, domain, id) alone."""
    streams = _mix(keys + _signed((domain * 0xD1B54A32D192ED03) % (1 << 64)))
    bits = _mix(streams.to(ids.device)[:, None] + (ids + 1) * GAMMA)
    # 52 bits and a half: inside (0, 1), both ends excluded, exactly representable.
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform))


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64, on int64 that wrap around."""
    bits = (bits ^ _shift(bits, 30)) * MIX_1
    bits = (bits ^ _shift(bits, 27)) * MIX_2
    return bits ^ _shift(bits, 31)


def _shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift: int64's own shift drags the sign along."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
