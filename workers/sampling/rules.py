"""How each row's token is drawn, by its own parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from workers.batch import SamplingColumns
from workers.sampling.draw import Draws, Narrowing, draw_greedy, draw_of_best
from workers.sampling.masses import Scale
from workers.sampling.noise import row_keys
from workers.sampling.segments import SegmentedRows
from workers.staging import upload_together

# A top-k up to the last of these has its tokens picked and sorted, and rows up to the same one go
# together: what is as wide as the widest of them costs the others little.
NARROW = torch.tensor([32, 128, 512], dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class AdjustedRows:
    """n of R rows, as their parameters want them."""

    rows: SegmentedRows
    index: torch.Tensor  # [n] int64, into `rows`; CPU
    numbers: torch.Tensor  # [n] int64, of R; CPU


class Rule(IntEnum):
    """How a row is drawn, by its own parameters alone."""

    GREEDY = 0
    # A top-k up to each of NARROW.
    TOP_32 = 1
    TOP_128 = 2
    TOP_512 = 3
    ONCE = 4  # nothing refuses the token that is drawn
    NARROWING = 5


def find_rules(columns: SamplingColumns, numbers: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[n] int64, the Rule of the rows `numbers` [n]."""
    top_k = columns.top_k[numbers]
    # What min-p or a top-k alone leave out is left out beforehand.
    rules = torch.where(columns.top_p[numbers] < 1, Rule.NARROWING, Rule.ONCE)
    narrow = (top_k > 0) & (top_k < vocab_size) & (top_k <= NARROW[-1])
    rules = torch.where(narrow, torch.bucketize(top_k, NARROW) + Rule.TOP_32, rules)
    return rules.masked_fill_(columns.temperature[numbers] == 0, Rule.GREEDY)


def make_draws(
    group: AdjustedRows,
    here: torch.Tensor,
    best: torch.Tensor,
    positions: torch.Tensor,
    columns: SamplingColumns,
) -> Draws:
    """Of the group's rows `here` [n], whose best logits [n] are given, where the logits are."""
    numbers = group.numbers[here]
    temperature = columns.temperature[numbers].double()
    top_k = columns.top_k[numbers].long()
    index, top_k, keys, temperature, top_p, below_best = upload_together(
        (
            group.index[here],
            top_k.masked_fill_(top_k >= group.rows.vocab_size, 0),
            row_keys(columns.seed[numbers], positions[numbers].long()),
            temperature,
            columns.top_p[numbers].double(),
            temperature * columns.min_p[numbers].double().log(),
        ),
        best.device,
    )
    return Draws(
        rows=group.rows,
        index=index,
        scale=Scale(best, temperature.float()),
        top_k=top_k,
        top_p=top_p,
        cutoff=(best.double() + below_best).float(),
        keys=keys,
        widest=group.rows.vocab_size,
    )


def part_of(draws: Draws, rows: slice, columns: SamplingColumns, numbers: torch.Tensor) -> Draws:
    """The rows `numbers`, and what the host knows of them."""
    top_k = columns.top_k[numbers]
    widest = int(top_k.masked_fill_(top_k >= draws.rows.vocab_size, 0).max())
    bounded = widest > 0 or bool((columns.min_p[numbers] > 0).any())
    return replace(draws.take(rows), widest=widest, bounded=bounded)


def _draw_greedy(draws: Draws) -> torch.Tensor:
    return draw_greedy(draws.rows, draws.index)


RULES: Mapping[Rule, Callable[[Draws], torch.Tensor]] = {
    Rule.GREEDY: _draw_greedy,
    Rule.TOP_32: draw_of_best,
    Rule.TOP_128: draw_of_best,
    Rule.TOP_512: draw_of_best,
    Rule.ONCE: lambda draws: Narrowing(draws).draw_once(),
    Rule.NARROWING: lambda draws: Narrowing(draws).draw(),
}
