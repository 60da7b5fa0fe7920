"""From logits to tokens: checks, edits, masks, then a draw by the rule of each row."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch

from workers.batch import SamplerInputs, SamplingColumns, TokenMasks
from workers.sampling.draw import Draws, Narrowing, draw_greedy, draw_of_best
from workers.sampling.edits import Editor
from workers.sampling.logprobs import Logprobs, compute_logprobs
from workers.sampling.masks import ceilings, dense_rows
from workers.sampling.masses import Scale
from workers.sampling.noise import row_keys
from workers.sampling.segments import NEVER, SegmentedRows, pieces

# A top-k up to the last of these has its tokens picked and sorted, and rows up to the same one go
# together: what is as wide as the widest of them costs the others little.
NARROW = torch.tensor([32, 128, 512], dtype=torch.int32)


class Fault(IntEnum):
    """Why a row has no token; the numbers are those of the wire."""

    NONE = 0
    INVALID_LOGITS = 1  # NaN or infinite, be it only by biases or penalties
    EMPTY_SUPPORT = 2  # biases, masks and bad words leave no token


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One token of each of R rows. CPU tensors."""

    token_ids: torch.Tensor  # [R] int64, 0 where the row has a fault
    faults: torch.Tensor  # [R] uint8, Fault
    logprobs: Logprobs  # of the rows that asked for them and have no fault


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """n of R rows, as their parameters want them."""

    rows: SegmentedRows
    index: torch.Tensor  # [n] int64, into `rows`; CPU
    numbers: torch.Tensor  # [n] int64, of R; CPU


class Sampler:
    """Stateless but for scratch memory."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        """`eos_token_ids` end a sequence; they are ids of the vocabulary."""
        self._editor = Editor(torch.tensor(eos_token_ids, dtype=torch.int64))
        self._masked: torch.Tensor | None = None  # float32, rows under a dense mask

    @torch.inference_mode()
    def sample(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        columns: SamplingColumns,
        inputs: SamplerInputs,
        masks: TokenMasks,
    ) -> Samples:
        """Samples a token of each row of logits [R, V] float32.

        Rows must not share memory; they are changed in between and put back. positions [R] int64
        are those of the sampled tokens. A token must be allowed by `masks` as well as by those of
        `inputs`.
        """
        num_rows = len(positions)
        token_ids = torch.zeros(num_rows, dtype=torch.int64)
        raw = SegmentedRows(logits)
        sound = raw.best.isfinite().cpu()
        faults = torch.where(sound, Fault.NONE, Fault.INVALID_LOGITS).to(torch.uint8)
        with self.adjusted(raw, positions, columns, inputs, masks) as groups:
            for group in groups:
                best = group.rows.best[group.index.to(logits.device)].cpu()
                here = sound[group.numbers]
                faults[group.numbers[here & (best == NEVER)]] = Fault.EMPTY_SUPPORT
                damaged = here & ~best.isfinite() & (best != NEVER)
                faults[group.numbers[damaged]] = Fault.INVALID_LOGITS
                self._draw(token_ids, group, best, positions, columns, faults == Fault.NONE)
        asked = (columns.num_logprobs >= 0) & (faults == Fault.NONE)
        told = asked.nonzero().flatten()
        logprobs = compute_logprobs(raw, told, token_ids[told], columns.num_logprobs[told].long())
        return Samples(token_ids=token_ids, faults=faults, logprobs=logprobs)

    @torch.inference_mode()
    def score(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_tops: torch.Tensor
    ) -> Logprobs:
        """Logprobs of known tokens [P] under logits [P, V] float32, with num_tops [P] others."""
        index = torch.arange(len(token_ids))
        return compute_logprobs(SegmentedRows(logits), index, token_ids.long(), num_tops.long())

    @contextmanager
    def adjusted(
        self,
        raw: SegmentedRows,
        positions: torch.Tensor,
        columns: SamplingColumns,
        inputs: SamplerInputs,
        masks: TokenMasks,
    ) -> Iterator[list[AdjustedRows]]:
        """The rows after biases, masks and penalties, where they are during the block."""
        logits = raw.values
        numbers = torch.arange(len(positions))
        with self._editor.edited(logits, positions, columns, inputs, masks) as changed:
            rows = SegmentedRows(logits) if changed else raw
            under_mask = torch.zeros(len(positions), dtype=torch.bool)
            under_mask[dense_rows(inputs.masks)] = True
            under_mask[dense_rows(masks)] = True
            free, dense = numbers[~under_mask], numbers[under_mask]
            groups = [AdjustedRows(rows, free, free)]
            if len(dense):
                masked = self._mask(logits, dense, inputs.masks, masks)
                groups.append(AdjustedRows(SegmentedRows(masked), numbers[: len(dense)], dense))
            yield groups

    def _mask(
        self, logits: torch.Tensor, numbers: torch.Tensor, *all_masks: TokenMasks
    ) -> torch.Tensor:
        """A copy [n, V] of the rows `numbers` [n], rising, under their dense masks."""
        vocab_size, device = logits.shape[1], logits.device
        size = len(numbers) * vocab_size
        if self._masked is None or len(self._masked) < size or self._masked.device != device:
            self._masked = torch.empty(size, device=device)
        masked = self._masked[:size].view(-1, vocab_size)
        for piece in pieces(len(numbers), vocab_size, device):
            here = numbers[piece]
            part = logits[here.to(device)]
            for masks in all_masks:
                limit = ceilings(masks, here, vocab_size, device)
                if limit is not None:
                    torch.minimum(part, limit, out=part)
            masked[piece] = part
        return masked

    def _draw(
        self,
        token_ids: torch.Tensor,
        group: AdjustedRows,
        best: torch.Tensor,
        positions: torch.Tensor,
        columns: SamplingColumns,
        sound: torch.Tensor,
    ) -> None:
        """Sets token_ids [R] of the group's rows that are `sound` [R]; best [n], all on the CPU."""
        wanted = sound[group.numbers]
        greedy = columns.temperature[group.numbers] == 0
        top_k = columns.top_k[group.numbers]
        cut = (top_k > 0) & (top_k < group.rows.vocab_size)
        device = group.rows.values.device
        here = (wanted & greedy).nonzero().flatten()
        if len(here):
            drawn = draw_greedy(group.rows, group.index[here].to(device))
            token_ids[group.numbers[here]] = drawn.cpu()
        width = torch.bucketize(top_k, NARROW).masked_fill_(~cut, len(NARROW))
        rules = [draw_of_best] * len(NARROW) + [_draw_by_narrowing]
        for number, draw in enumerate(rules):
            here = (wanted & ~greedy & (width == number)).nonzero().flatten()
            if len(here):
                draws = make_draws(group, here, best[here], positions, columns)
                token_ids[group.numbers[here]] = draw(draws).cpu()


def make_draws(
    group: AdjustedRows,
    here: torch.Tensor,
    best: torch.Tensor,
    positions: torch.Tensor,
    columns: SamplingColumns,
) -> Draws:
    """Of the group's rows `here` [n], whose temperature is no 0 and whose best logits are given."""
    device = group.rows.values.device
    numbers = group.numbers[here]
    temperature = columns.temperature[numbers]
    below_best = temperature.double() * columns.min_p[numbers].double().log()
    cutoff = (best.double() + below_best).float()
    return Draws(
        rows=group.rows,
        index=group.index[here].to(device),
        scale=Scale(best.to(device), temperature.to(device)),
        top_k=columns.top_k[numbers].long().to(device),
        top_p=columns.top_p[numbers].double().to(device),
        cutoff=cutoff.to(device),
        keys=row_keys(columns.seed[numbers], positions[numbers].long()).to(device),
    )


def _draw_by_narrowing(draws: Draws) -> torch.Tensor:
    return Narrowing(draws).draw()
