"""A sequence that may not end yet samples no end-of-sequence token."""

import pytest
import torch

from tests.sampling import NEVER, Row, sample, spread_logits
from tests.tiny_models import Feeder, load_executor, make_batch, save_tiny_model
from workers.sampling.sampler import Fault

pytestmark = pytest.mark.cpu


def test_a_greedy_row_takes_the_second_best_until_its_min_length():
    logits = torch.tensor([0.0, 4.0, 1.0, 3.0])
    columns = {"temperature": 0.0, "min_length": 6}
    rows = [Row(logits=logits, position=position, columns=columns) for position in (4, 5, 6, 7)]

    assert sample(rows, eos_token_ids=[1]).token_ids.tolist() == [3, 3, 1, 1]
    assert sample(rows, eos_token_ids=[3, 1]).token_ids.tolist() == [2, 2, 1, 1]
    assert sample(rows).token_ids.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("vocabulary", [300, 5000])
@pytest.mark.parametrize(
    "columns", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5000}]
)
def test_a_row_draws_as_if_the_ends_had_no_probability(vocabulary, columns):
    logits = spread_logits(vocabulary)
    ends = logits.topk(2).indices

    def tokens(logits: torch.Tensor, min_length: int) -> torch.Tensor:
        row = Row(logits=logits, position=3, columns={**columns, "min_length": min_length})
        return sample([row.asking(seed=seed) for seed in range(300)], ends.tolist()).token_ids

    held, ended = tokens(logits, 4), tokens(logits, 3)

    assert held.equal(tokens(logits.index_fill(0, ends, NEVER), 0))
    assert not torch.isin(held, ends).any()
    assert torch.isin(ended, ends).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_damaged_end_is_noticed_where_it_may_not_be_sampled(value):
    logits = torch.zeros(10)
    rows = [Row(logits=logits, columns={"min_length": 9})] * 3
    rows[1] = Row(logits=logits.index_fill(0, torch.tensor(7), value), columns=rows[1].columns)

    assert sample(rows, eos_token_ids=[7]).faults.tolist() == [0, Fault.INVALID_LOGITS, 0]


def test_a_vocabulary_of_ends_alone_is_a_fault():
    row = Row(logits=torch.zeros(3))

    samples = sample([row, row.asking(min_length=9)], eos_token_ids=[0, 1, 2])

    assert samples.faults.tolist() == [0, Fault.EMPTY_SUPPORT]


def test_the_ends_are_those_of_the_checkpoint(tmp_path):
    """The model's favourite ends a text; 5,000 is past its vocabulary of 211."""
    text = [5, 6, 7]
    favourite = first_tokens(save_tiny_model(tmp_path / "endless"), text)[0]
    folder = tmp_path / "ending"
    (tmp_path / "endless").rename(folder)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{favourite}, 5000]}}')

    free, held = first_tokens(folder, text)

    assert free == favourite
    assert held != favourite


def first_tokens(folder, text):
    """What follows the text greedily: where it may end there, and where it may not."""
    feeder = Feeder(load_executor(folder))
    rows = [feeder.row(1, text, min_length=3), feeder.row(2, text, min_length=4)]
    return list(feeder.executor.execute_model(make_batch(rows)).values())
