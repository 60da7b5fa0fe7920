"""Attention modules that count positions by themselves take those of the step."""

import pytest
import torch
from torch import nn

from workers.layers.counted_positions import CountedForward, Offsets, count_by_position_ids

pytestmark = pytest.mark.cpu

# Of three sequences in one step: a chunk, a single token, a prompt.
POSITIONS = torch.tensor([[7, 8, 9, 42, 0, 1]])


def test_offsets_make_rows_into_positions() -> None:
    offsets = Offsets(POSITIONS).get_seq_length(0, layer_idx=1)
    assert offsets.tolist() == [7, 7, 7, 39, -4, -4]
    # As the modules count: rows of this pass, behind what the cache holds.
    assert torch.equal(torch.arange(6) + offsets, POSITIONS[0])


def test_keys_and_values_pass_by() -> None:
    key, value = torch.ones(1, 2, 6, 4), torch.zeros(1, 2, 6, 4)
    assert Offsets(POSITIONS).update(key, value, 3, {"cos": None}) == (key, value)


def by_cache(hidden: torch.Tensor, *, cache: Offsets) -> list[int]:
    return (hidden + cache.get_seq_length()).tolist()


def by_past_key_values(
    hidden: torch.Tensor, past_key_values: Offsets | None = None, cache_position: object = None
) -> tuple[list[int], object]:
    assert past_key_values is not None
    return (hidden + past_key_values.get_seq_length()).tolist(), cache_position


def test_a_forward_gets_the_positions_under_either_name() -> None:
    rows = torch.arange(6)
    assert CountedForward(by_cache, lambda: POSITIONS)(rows, cache=None) == POSITIONS[0].tolist()
    counted, given = CountedForward(by_past_key_values, lambda: POSITIONS)(rows)
    assert counted == POSITIONS[0].tolist()
    assert torch.equal(given, POSITIONS[0])


class Llama4TextAttention(nn.Module):
    """Counts as the class of this name does."""

    def forward(self, hidden: torch.Tensor, cache: Offsets | None = None) -> torch.Tensor:
        before = 0 if cache is None else cache.get_seq_length()
        return torch.arange(hidden.shape[1]) + before


class LlamaAttention(Llama4TextAttention):
    """Goes by the positions that it is given."""


def test_only_modules_that_count_are_changed_and_follow_every_step() -> None:
    model = nn.ModuleList([Llama4TextAttention(), LlamaAttention()])
    steps = [POSITIONS, torch.tensor([[3, 3]])]
    current = iter(steps)
    count_by_position_ids(model, lambda: next(current))
    counting, other = model
    for step in steps:
        hidden = torch.zeros(step.shape)
        assert torch.equal(counting(hidden), step[0])
        assert torch.equal(other(hidden), torch.arange(step.shape[1]))
