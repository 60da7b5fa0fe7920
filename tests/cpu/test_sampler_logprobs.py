"""Logprobs are those of the raw logits, whatever is asked of the sampler."""

import pytest
import torch

from tests.sampling import NEVER, Row, integers, sample, spread_logits
from workers.batch import MaskKind
from workers.sampling.logprobs import IMPOSSIBLE
from workers.sampling.sampler import Sampler

pytestmark = pytest.mark.cpu

ASKED = {
    "temperature": 0.5,
    "top_k": 3,
    "repetition_penalty": 1.5,
    "frequency_penalty": 1.0,
}


def close(ours: torch.Tensor, exact: torch.Tensor) -> bool:
    return torch.allclose(ours.double(), exact.double(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("vocabulary", [7, 1000, 4096, 5000, 32000])
@pytest.mark.parametrize("scale", [0.1, 3, 30])
def test_they_are_the_log_softmax_of_the_raw_logits(vocabulary, scale):
    logits = [spread_logits(vocabulary, seed=seed, scale=scale) for seed in range(6)]
    rows = [
        Row(
            logits=each,
            columns={**ASKED, "num_logprobs": seed - 1},
            mask=(MaskKind.ALLOWED, [1, 5, vocabulary - 1]) if seed % 2 else None,
            biases={3: 5.0},
            output=[2, 2, 4],
        )
        for seed, each in enumerate(logits)
    ]

    samples = sample(rows)

    told = samples.logprobs
    assert told.rows.tolist() == [1, 2, 3, 4, 5]
    assert told.num_tops.tolist() == [0, 1, 2, 3, 4]
    for place, row in enumerate(told.rows.tolist()):
        exact = logits[row].double().log_softmax(-1)
        count = int(told.num_tops[place])
        best = exact.topk(count)
        assert close(told.logprobs[place], exact[samples.token_ids[row]])
        assert told.top_token_ids[place, :count].equal(best.indices)
        assert close(told.top_logprobs[place, :count], best.values)
        assert (told.top_logprobs[place, count:] == NEVER).all()


def test_all_of_the_vocabulary_may_be_told():
    logits = spread_logits(700)

    told = sample([Row(logits=logits, columns={"num_logprobs": 5000})]).logprobs

    assert told.num_tops.tolist() == [700]
    assert told.top_token_ids[0].equal(logits.argsort(descending=True))


def test_equal_tops_are_told_by_rising_id():
    told = sample([Row(logits=torch.zeros(1500), columns={"num_logprobs": 4})]).logprobs

    assert told.top_token_ids.tolist() == [[0, 1, 2, 3]]
    assert close(told.top_logprobs, torch.full((1, 4), 1 / 1500).log())


def test_tokens_of_probability_0_are_no_tops():
    logits = torch.full((600,), NEVER)
    logits[[7, 550]] = torch.tensor([1.0, 2.0])

    told = sample([Row(logits=logits, columns={"num_logprobs": 5})]).logprobs

    assert told.num_tops.tolist() == [2]
    assert told.top_token_ids[0, :2].tolist() == [550, 7]
    assert told.logprobs.isfinite().all()


@pytest.mark.parametrize("vocabulary", [7, 5000])
def test_scores_of_known_tokens(vocabulary):
    logits = torch.stack([spread_logits(vocabulary, seed=seed) for seed in range(4)])
    logits[1, 3] = NEVER
    token_ids = integers([0, 3, 4, 5])

    told = Sampler([]).score(logits, token_ids.int(), integers([0, 2, 7, 1]).int())

    exact = logits.log_softmax(-1)
    own = exact.gather(1, token_ids[:, None]).flatten()
    assert told.rows.tolist() == [0, 1, 2, 3]
    assert told.num_tops.tolist() == [0, 2, 7, 1]
    assert told.logprobs[1] == IMPOSSIBLE
    others = integers([0, 2, 3])
    assert close(told.logprobs[others], own[others])
    assert told.top_token_ids[2].equal(logits[2].topk(7).indices)
    assert close(told.top_logprobs[2, :7], exact[2].topk(7).values)


def test_what_is_too_far_below_the_best_for_a_number_is_told_as_impossible():
    told = Sampler([]).score(torch.tensor([[3e38, -3e38, 0.0]]), integers([1]), integers([3]))

    assert told.logprobs.tolist() == [IMPOSSIBLE]
    assert told.num_tops.tolist() == [2]
    assert told.top_token_ids[0, :2].tolist() == [0, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), NEVER])
def test_damaged_logits_have_no_probabilities(value):
    """NaN tells the driver to fail their request; the others are as ever."""
    logits = torch.stack([spread_logits(600), torch.full((600,), value), spread_logits(600)])

    told = Sampler([]).score(logits, integers([1, 1, 1]), integers([2, 2, 2]))

    assert told.num_tops.tolist() == [2, 0, 2]
    assert told.logprobs.isnan().tolist() == [False, True, False]
