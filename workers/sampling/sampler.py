"""From logits to tokens: checks, edits, masks, then a draw by the rule of each row."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite

import torch

from workers.batch import NO_INPUTS, NO_MASKS, SamplerInputs, SamplingColumns, TokenMasks
from workers.sampling.draw import draw_greedy
from workers.sampling.edits import Editor
from workers.sampling.logprobs import NO_LOGPROBS, Logprobs, compute_logprobs
from workers.sampling.masks import ceilings, dense_rows
from workers.sampling.rules import RULES, AdjustedRows, Rule, find_rules, make_draws, part_of
from workers.sampling.segments import NEVER, SegmentedRows, pieces
from workers.staging import Arriving, upload

FEW = 1 << 18  # logits of a step


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


# What a step sampled, and scores; waits for the device, from any thread.
Sampled = Callable[[], tuple[Samples, Logprobs]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn for R rows, where the logits are: nobody has waited for it."""

    token_ids: torch.Tensor  # [R] int64, 0 where the row has a fault
    raw: SegmentedRows | None  # before any parameter; None where no row tells logprobs
    arriving: Arriving  # token ids and faults, [R] int64 and [R] uint8


class Sampler:
    """Stateless but for scratch memory."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        """`eos_token_ids` end a sequence; they are ids of the vocabulary."""
        self._editor = Editor(torch.tensor(eos_token_ids, dtype=torch.int64))
        self._masked: torch.Tensor | None = None  # float32, rows under a dense mask
        self._plain: SamplingColumns | None = None  # the last of which no row asks for anything

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
        return self.tell(self.draw(logits, positions, columns, inputs, masks), columns)

    @torch.inference_mode()
    def draw(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        columns: SamplingColumns,
        inputs: SamplerInputs,
        masks: TokenMasks,
    ) -> Drawn:
        """As `sample`, but without waiting for the device; `tell` does."""
        if self._takes_best(logits, positions, columns, inputs, masks):
            best, token_ids = logits.max(dim=-1)  # of equals the one with the lowest id
            faults = find_faults(best, best)
            if bool(faults.any()):
                token_ids.masked_fill_(faults != Fault.NONE, 0)
            return Drawn(token_ids, None, Arriving((token_ids, faults)))
        raw = SegmentedRows(logits)
        token_ids = torch.zeros(len(positions), dtype=torch.int64, device=logits.device)
        with self.adjusted(raw, positions, columns, inputs, masks) as groups:
            best = _best_of(groups)
            faults = find_faults(raw.best, best)
            for group in groups:
                here = torch.arange(len(group.numbers))
                if raw.is_on_host:  # where looking is free, rows with a fault aren't drawn
                    here = (faults[group.numbers] == Fault.NONE).nonzero().flatten()
                if len(here):
                    self._draw(token_ids, group, here, best, positions, columns)
        token_ids.masked_fill_(faults != Fault.NONE, 0)
        return Drawn(token_ids, raw, Arriving((token_ids, faults)))

    def _takes_best(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        columns: SamplingColumns,
        inputs: SamplerInputs,
        masks: TokenMasks,
    ) -> bool:
        """Whether the best of few logits on the host are all that is asked for.

        Then segments, and a look at each parameter, cost more than they save.
        """
        if logits.device.type != "cpu" or logits.numel() > FEW:
            return False
        has_inputs = inputs is not NO_INPUTS or masks is not NO_MASKS
        if columns is self._plain and not has_inputs:
            return True
        takes_best = (
            not bool(columns.temperature.any())
            and bool((columns.num_logprobs < 0).all())
            and self._editor.leaves(positions, columns, inputs, masks)
        )
        # Steps of the same sequences share their columns.
        is_plain = takes_best and not has_inputs and not bool(columns.min_length.any())
        self._plain = columns if is_plain else None
        return takes_best

    @torch.inference_mode()
    def tell(self, drawn: Drawn, columns: SamplingColumns) -> Samples:
        """Waits for what was drawn by `columns`."""
        token_ids, faults = drawn.arriving.wait()
        if drawn.raw is None:
            return Samples(token_ids=token_ids, faults=faults, logprobs=NO_LOGPROBS)
        told = ((columns.num_logprobs >= 0) & (faults == Fault.NONE)).nonzero().flatten()
        tops = columns.num_logprobs[told].long()
        logprobs = compute_logprobs(drawn.raw, told, token_ids[told], tops)
        return Samples(token_ids=token_ids, faults=faults, logprobs=logprobs)

    @torch.inference_mode()
    def score(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_tops: torch.Tensor
    ) -> Logprobs:
        """Logprobs of known tokens [P] under logits [P, V] float32, with num_tops [P] others."""
        if len(token_ids) == 0:
            return NO_LOGPROBS
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
            if not (inputs.masks.rows.numel() or masks.rows.numel()):
                yield [AdjustedRows(rows, numbers, numbers)]
                return
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
            part = logits[upload(here, device)]
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
        here: torch.Tensor,
        best: torch.Tensor,
        positions: torch.Tensor,
        columns: SamplingColumns,
    ) -> None:
        """Sets token_ids [R] of the group's rows `here` [n], by the best logits [R] of all."""
        if not bool(columns.temperature[group.numbers[here]].any()):
            numbers, index = group.numbers[here], group.index[here]
            device = token_ids.device
            token_ids[upload(numbers, device)] = draw_greedy(group.rows, upload(index, device))
            return
        rules = find_rules(columns, group.numbers[here], group.rows.vocab_size)
        counts = rules.bincount(minlength=len(Rule)).tolist()
        if group.rows.is_on_host and counts[Rule.ONCE] and counts[Rule.NARROWING]:
            # One pass for both: there it costs nothing to ask whether a token is refused.
            rules.masked_fill_(rules == Rule.ONCE, Rule.NARROWING)
            counts[Rule.NARROWING] += counts[Rule.ONCE]
            counts[Rule.ONCE] = 0
        if max(counts) < len(here):
            here = here[rules.argsort(stable=True)]  # rows of a rule one after the other
        numbers = upload(group.numbers[here], token_ids.device)
        draws = make_draws(group, here, best[numbers], positions, columns)
        start = 0
        for rule, count in zip(Rule, counts, strict=True):
            if count:
                part = slice(start, start + count)
                own = part_of(draws, part, columns, group.numbers[here[part]])
                token_ids[numbers[part]] = RULES[rule](own)
                start += count


def find_faults(raw_best: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """[R] uint8 from the best logits [R] of the rows as they came and as they are to be drawn."""
    if best.device.type == "cpu" and isfinite(float(best.sum()) + float(raw_best.sum())):
        return torch.zeros(len(best), dtype=torch.uint8)
    unfit = torch.where(best == NEVER, Fault.EMPTY_SUPPORT, Fault.INVALID_LOGITS)
    faults = unfit.masked_fill_(best.isfinite(), Fault.NONE)
    return faults.masked_fill_(~raw_best.isfinite(), Fault.INVALID_LOGITS).to(torch.uint8)


def _best_of(groups: Sequence[AdjustedRows]) -> torch.Tensor:
    """The best logit [R] of every row."""
    free, *others = groups
    if not others:
        return free.rows.best
    best = free.rows.best.clone()
    for group in others:
        best[upload(group.numbers, best.device)] = group.rows.best
    return best
