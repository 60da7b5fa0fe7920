"""The best tokens of rows are those of a stable sort."""

import pytest
import torch

from workers.sampling.candidates import bounds_of_best, most_probable
from workers.sampling.segments import NEVER, SegmentedRows

pytestmark = pytest.mark.cpu


def test_equal_tokens_are_kept_by_the_lower_id():
    values = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [5.0] * 6, [NEVER, 1.0, *[NEVER] * 4]])

    ids, kept = most_probable(SegmentedRows(values), torch.arange(3), torch.tensor([3, 2, 3]))

    assert ids[0].tolist() == [1, 2, 3]
    assert ids[1, :2].tolist() == [0, 1]
    assert kept[1].tolist() == [5.0, 5.0, NEVER]
    assert kept[2].tolist() == [1.0, NEVER, NEVER]


@pytest.mark.parametrize("vocabulary", [300, 5000, 32000])
@pytest.mark.parametrize("distinct", [3, 50, 10_000])
def test_the_most_probable_are_those_of_a_stable_sort(vocabulary, distinct):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(distinct, (6, vocabulary), generator=generator).float()
    values[4] = 7.0
    index = torch.tensor([5, 0, 4, 4, 2])
    counts = torch.tensor([4, 0, 9, 15, 1])
    ordered, order = values.sort(dim=-1, descending=True, stable=True)

    for factor in (1, 19):
        ids, kept = most_probable(SegmentedRows(values), index, counts * factor)

        for place, (row, count) in enumerate(zip(index, counts * factor, strict=True)):
            assert ids[place, :count].equal(order[row, :count])
            assert kept[place, :count].equal(ordered[row, :count])
            assert (kept[place, count:] == NEVER).all()


@pytest.mark.parametrize("vocabulary", [300, 1024, 5000, 32000])
@pytest.mark.parametrize("distinct", [1, 3, 50, 10_000_000])
def test_the_best_end_where_a_stable_sort_has_them_end(vocabulary, distinct):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(distinct, (4, vocabulary), generator=generator).float()
    values[2, 100:] = NEVER
    index = torch.tensor([3, 0, 0, 1, 2, 2, 1])
    counts = torch.tensor([1, 2, vocabulary // 2, vocabulary - 1, 99, 101, vocabulary])
    order = values.argsort(dim=-1, descending=True, stable=True)

    bounds = bounds_of_best(SegmentedRows(values), index, counts)

    kept = bounds.admits(values[index], torch.arange(vocabulary)) & (values[index] > NEVER)
    for place, (row, count) in enumerate(zip(index, counts, strict=True)):
        best = order[row, : min(int(count), 100) if row == 2 else count]
        assert kept[place].nonzero().flatten().equal(best.sort().values)
