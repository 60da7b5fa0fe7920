"""A sequence that may not end yet samples no end-of-sequence token."""

from dataclasses import replace

import pytest
import torch

from tests.sampling import make_rows, mixed_batch, pick, sample, spread_logits
from tests.tiny_models import Feeder, load_executor, make_batch, save_tiny_model
from workers.errors import WorkerError

pytestmark = pytest.mark.cpu

NEVER = float("-inf")


def test_a_greedy_row_takes_the_second_best_until_its_min_length():
    logits = torch.tensor([[0.0, 4.0, 1.0, 3.0]]).expand(4, -1)
    rows = make_rows(4, temperature=0.0, position=torch.tensor([4, 5, 6, 7]), min_length=6)

    assert sample(logits, rows, eos_token_ids=[1]).tolist() == [3, 3, 1, 1]
    assert sample(logits, rows, eos_token_ids=[3, 1]).tolist() == [2, 2, 1, 1]
    assert sample(logits, rows).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("vocabulary", [300, 5000])
@pytest.mark.parametrize("parameters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5000}])
def test_a_row_draws_as_if_the_ends_had_no_probability(vocabulary, parameters):
    logits = spread_logits(vocabulary).repeat(300, 1)
    ends = logits[0].topk(2).indices
    without = logits.index_fill(1, ends, NEVER)

    held = sample(logits, make_rows(300, min_length=4, **parameters), ends.tolist())
    ended = sample(logits, make_rows(300, min_length=3, **parameters), ends.tolist())

    assert held.equal(sample(without, make_rows(300, **parameters)))
    assert not torch.isin(held, ends).any()
    assert torch.isin(ended, ends).any()


@pytest.mark.parametrize("vocabulary", [211, 5000])
def test_rows_that_may_end_do_not_notice_those_that_may_not(vocabulary):
    logits, rows = mixed_batch(vocabulary)
    ends = logits.argmax(dim=-1).unique()
    before = logits.clone()
    free = replace(rows, min_length=torch.zeros_like(rows.min_length))
    held = rows.min_length > 0

    tokens = sample(logits, rows, ends.tolist())
    alone = torch.cat(
        [
            sample(logits[i : i + 1], pick(rows, torch.tensor([i])), ends.tolist())
            for i in range(len(logits))
        ]
    )

    assert tokens[~held].equal(sample(logits, free)[~held])
    assert not torch.isin(tokens[held], ends).any()
    assert alone.equal(tokens)
    assert logits.equal(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_damaged_end_is_noticed_where_it_may_not_be_sampled(value):
    logits = torch.zeros(3, 10)
    logits[1, 7] = value

    with pytest.raises(WorkerError, match="sequence 1"):
        sample(logits, make_rows(3, min_length=9), eos_token_ids=[7])


def test_a_vocabulary_of_ends_alone_is_refused():
    rows = make_rows(2, min_length=torch.tensor([0, 9]))

    with pytest.raises(WorkerError, match="sequence 1 is -inf"):
        sample(torch.zeros(2, 3), rows, eos_token_ids=[0, 1, 2])


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
