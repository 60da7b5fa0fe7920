"""Exact probabilities against transformers' own processors, then draws against probabilities."""

import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from tests.quick import quick
from tests.sampling import (
    NEVER,
    Row,
    arguments,
    expected_scores,
    sample,
    spread_logits,
)
from workers.batch import MaskKind
from workers.sampling.candidates import most_probable
from workers.sampling.draw import Narrowing, kept_of_best
from workers.sampling.masses import Bounds
from workers.sampling.rules import NARROW, make_draws
from workers.sampling.sampler import Sampler
from workers.sampling.segments import SegmentedRows

pytestmark = pytest.mark.cpu

VOCABULARY = 1000
EOS = (5, 700)
CHUNK = 2000
HISTORY = {"prompt": [3, 9, 3, 500, 998], "output": [9, 9, 41, 7, 8]}
ALONE = {
    "nothing": {},
    "temperature": {"columns": {"temperature": 0.6}},
    "hot": {"columns": {"temperature": 1.7}},
    "top_k": {"columns": {"top_k": 20}},
    "many top_k": {"columns": {"top_k": 700}},
    "many top_k and top_p": {"columns": {"top_k": 800, "top_p": 0.9, "temperature": 1.5}},
    "many top_k and min_p": {"columns": {"top_k": 800, "min_p": 0.001, "temperature": 1.5}},
    "all top_k": {"columns": {"top_k": 5000}},
    "top_p": {"columns": {"top_p": 0.8}},
    "little top_p": {"columns": {"top_p": 0.05}},
    "min_p": {"columns": {"min_p": 0.05}},
    "repetition": {"columns": {"repetition_penalty": 1.4}, **HISTORY},
    "negative repetition": {"columns": {"repetition_penalty": 0.7}, **HISTORY},
    "frequency": {"columns": {"frequency_penalty": 0.8}, **HISTORY},
    "presence": {"columns": {"presence_penalty": -0.9}, **HISTORY},
    "bias": {"biases": {4: 3.5, 999: -2.0, 17: NEVER}},
    "allowed": {"mask": (MaskKind.ALLOWED, [1, 512, 511, 999])},
    "forbidden": {"mask": (MaskKind.FORBIDDEN, [1, 512, 511, 999])},
    "bits": {"mask": (MaskKind.BITS, range(31, 990, 3))},
    "grammar": {"grammar": (MaskKind.BITS, range(0, 1000, 7))},
    "both masks": {
        "mask": (MaskKind.ALLOWED, [*range(400, 600)]),
        "grammar": (MaskKind.BITS, range(1, 1000, 2)),
    },
    "bad words": {"bad_words": [[7, 8, 11], [8, 12], [9, 13], [3, 9, 3, 7, 8, 14]], **HISTORY},
    "min_length": {"columns": {"min_length": 12}, "position": 10, **HISTORY},
    "min_length is reached": {"columns": {"min_length": 10}, "position": 10, **HISTORY},
}


def adjusted(
    row: Row, eos: Sequence[int] = EOS
) -> tuple[SegmentedRows, torch.Tensor, torch.Tensor]:
    """The row's logits as the sampler has them when it draws, and what it keeps of them: [V]."""
    logits, positions, columns, inputs, masks = arguments([row])
    with Sampler(eos).adjusted(SegmentedRows(logits), positions, columns, inputs, masks) as groups:
        group = next(each for each in groups if len(each.numbers))
        best = group.rows.best[group.index]
        draws = make_draws(group, torch.tensor([0]), best, positions, columns)
        vocabulary = group.rows.vocab_size
        values = group.rows.values[group.index[0]].clone()
        if 0 < draws.top_k < vocabulary and draws.top_k <= NARROW[-1]:
            ids, best_values = most_probable(draws.rows, draws.index, draws.top_k)
            kept = torch.zeros(vocabulary, dtype=torch.bool)
            kept[ids[0]] = kept_of_best(draws, best_values)[0]
        else:
            everyone = torch.arange(vocabulary)
            narrowing = Narrowing(draws.take(torch.zeros_like(everyone)))
            kept, _ = narrowing.judge(everyone, Bounds(values, everyone))
            kept &= narrowing.start.admits(values[:, None], everyone[:, None]).flatten()
    return group.rows, values, kept & (values > NEVER)


def exact_probabilities(row: Row) -> torch.Tensor:
    _, values, kept = adjusted(row)
    temperature = row.columns.get("temperature", 1.0)
    return (values.double() / temperature).masked_fill(~kept, NEVER).softmax(-1)


def assert_same_distribution(row: Row) -> None:
    ours = exact_probabilities(row)
    theirs = expected_scores(row, EOS).double().softmax(-1)
    assert (ours > 0).equal(theirs > 0)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-9)


def random_row(number: int) -> Row:
    """Of everything a little, with about half of the parameters set."""
    chance = random.Random(number)

    def maybe(values: object, otherwise: object) -> object:
        return values if chance.random() < 0.5 else otherwise

    def some(count: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(count)]

    columns = {
        "temperature": maybe(chance.uniform(0.3, 2), 1.0),
        "top_k": maybe(chance.choice([1, 2, 5, 40, 300, 513, 900]), 0),
        "top_p": maybe(chance.uniform(0.02, 0.99), 1.0),
        "min_p": maybe(chance.uniform(0.001, 0.3), 0.0),
        "repetition_penalty": maybe(chance.uniform(0.6, 1.8), 1.0),
        "frequency_penalty": maybe(chance.uniform(-1, 1), 0.0),
        "presence_penalty": maybe(chance.uniform(-1, 1), 0.0),
        "min_length": maybe(100, 0),
    }
    output = some(chance.randrange(1, 30))
    words = [[*output[-length:], chance.randrange(VOCABULARY)] for length in (1, 2) if length]
    kinds = list(MaskKind)
    return Row(
        logits=spread_logits(VOCABULARY, seed=number, scale=chance.choice([0.5, 2, 5])),
        position=50,
        columns=columns,
        biases=maybe({token: chance.uniform(-4, 4) for token in some(5)}, {}),
        mask=maybe((chance.choice(kinds), some(400)), None),
        grammar=maybe((MaskKind.BITS, some(2500)), None),
        bad_words=maybe([*words, some(3)], []),
        prompt=some(20),
        output=output,
    )


@pytest.mark.parametrize("name", ALONE)
def test_each_parameter_alone_is_that_of_transformers(name):
    row = Row(logits=spread_logits(VOCABULARY, seed=1), **ALONE[name])
    bare = expected_scores(Row(logits=row.logits)).softmax(-1)

    assert_same_distribution(row)

    changes = name not in ("nothing", "all top_k", "min_length is reached")
    assert changes is not torch.allclose(exact_probabilities(row).float(), bare)


@pytest.mark.parametrize("start", quick(range(0, 200, 50), 50))
def test_combinations_of_parameters_are_those_of_transformers(start):
    for number in range(start, start + 50):
        assert_same_distribution(random_row(number))


@pytest.mark.parametrize(
    ("distinct", "top_p", "top_k"),
    quick(product([1, 4], [1.0, 0.87, 0.33], [520, 999]), (4, 0.33, 520)),
)
def test_of_many_equal_tokens_a_wide_top_k_keeps_the_lowest_ids(top_k, top_p, distinct):
    """Transformers keeps all equals of the last one: the reference is a stable sort."""
    logits = torch.randint(distinct, (VOCABULARY,), generator=torch.Generator().manual_seed(0)) / 3
    order = logits.argsort(descending=True, stable=True)[:top_k]
    probabilities = logits[order].double().softmax(-1)
    kept = probabilities.cumsum(-1) - probabilities < top_p
    exact = torch.zeros(VOCABULARY, dtype=torch.float64)
    exact[order[kept]] = probabilities[kept] / probabilities[kept].sum()

    row = Row(logits=logits, columns={"top_k": top_k, "top_p": top_p})

    assert torch.allclose(exact_probabilities(row), exact, rtol=1e-6, atol=0)
    assert_follows(draw_many(row, 12_000), exact)


def test_a_cut_by_min_p_at_the_last_of_a_wide_top_k_lets_no_more_in():
    row = Row(logits=torch.zeros(VOCABULARY), columns={"top_k": 520, "min_p": 1.0})

    assert exact_probabilities(row).nonzero().flatten().tolist() == [*range(520)]


def draw_many(row: Row, count: int, eos: Sequence[int] = EOS) -> torch.Tensor:
    """Counts of tokens [V] over seeds."""
    counts = torch.zeros(len(row.logits), dtype=torch.int64)
    for start in range(0, count, CHUNK):
        rows = [row.asking(seed=seed) for seed in range(start, start + CHUNK)]
        samples = sample(rows, eos)
        assert not samples.faults.any()
        counts += samples.token_ids.bincount(minlength=len(row.logits))
    return counts


def assert_follows(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square within 5 deviations; rare tokens are counted together."""
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities.double() * counts.sum()
    common = expected >= 10
    seen = torch.cat((counts[common].double(), counts[~common].sum()[None].double()))
    wanted = torch.cat((expected[common], expected[~common].sum()[None]))
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    assert degrees > 0
    assert abs(statistic - degrees) < 5 * (2 * degrees) ** 0.5


DRAWN = {
    "free": {"columns": {"temperature": 0.7}},
    "top_k": {"columns": {"top_k": 40}},
    "top_p": {"columns": {"top_p": 0.7}},
    "little top_p": {"columns": {"top_p": 0.1}},
    "min_p": {"columns": {"min_p": 0.02}},
    "top_p and min_p": {"columns": {"top_p": 0.9, "min_p": 0.03, "temperature": 1.3}},
    "top_k and top_p": {"columns": {"top_k": 200, "top_p": 0.8, "temperature": 1.2}},
    "wide top_k": {"columns": {"top_k": 600, "temperature": 3.0}},
    "wide top_k and top_p": {"columns": {"top_k": 600, "top_p": 0.8, "temperature": 3.0}},
    "wide top_k and min_p": {"columns": {"top_k": 700, "min_p": 0.3, "temperature": 3.0}},
    "wide top_k, top_p and min_p": {
        "columns": {"top_k": 700, "top_p": 0.95, "min_p": 0.3, "temperature": 3.0}
    },
    "allowed": {"mask": (MaskKind.ALLOWED, [*range(490, 530)]), "columns": {"top_p": 0.9}},
    "bits": {"mask": (MaskKind.BITS, range(0, 1000, 3)), "columns": {"temperature": 0.9}},
    "everything": {
        "columns": {
            "temperature": 1.4,
            "top_k": 100,
            "top_p": 0.95,
            "min_p": 0.01,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.2,
        },
        "biases": {1: 4.0},
        **HISTORY,
    },
}


@pytest.mark.parametrize("name", quick(DRAWN, "top_k and top_p", "everything"))
def test_draws_follow_the_distribution(name):
    row = Row(logits=spread_logits(VOCABULARY, seed=2), **DRAWN[name])

    counts = draw_many(row, 20_000)

    assert_follows(counts, expected_scores(row, EOS).softmax(-1))


@pytest.mark.full
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("scale", [0.5, 2.5])
def test_many_draws_follow_the_distribution(name, scale):
    """Flat logits and peaked ones."""
    row = Row(logits=spread_logits(VOCABULARY, seed=5, scale=scale), **DRAWN[name])

    counts = draw_many(row, 100_000)

    assert_follows(counts, expected_scores(row, EOS).softmax(-1))


@pytest.mark.full
@pytest.mark.parametrize("columns", [{}, {"top_p": 0.6}, {"top_p": 0.95, "min_p": 0.001}])
def test_many_draws_follow_over_segments_that_differ(columns):
    """5,000 tokens in ten segments, the last not full, of which one has most of the mass."""
    logits = spread_logits(5000, scale=1.5)
    logits[1024:1536] += 4
    row = Row(logits=logits, columns=columns)

    counts = draw_many(row, 100_000)

    assert_follows(counts, expected_scores(row, EOS).softmax(-1))


def test_the_chi_square_test_can_fail():
    row = Row(logits=spread_logits(VOCABULARY))
    counts = draw_many(row, 20_000)

    with pytest.raises(AssertionError):
        assert_follows(counts, expected_scores(row.asking(temperature=1.1)).softmax(-1))


def test_successive_positions_draw_independently():
    rows = [
        Row(logits=torch.zeros(4), position=position, columns={"seed": seed})
        for seed in range(10_000)
        for position in (7, 8)
    ]

    first, second = sample(rows).token_ids.view(-1, 2).unbind(1)

    assert_follows((first * 4 + second).bincount(minlength=16), torch.full((16,), 1 / 16))


@pytest.mark.full
def test_attempts_at_one_row_draw_independently():
    """Half of the mass is refused; what is drawn then does not depend on what was refused."""
    logits = torch.tensor([1.0] * 300 + [0.0] * 500 + [1.0] * 200) - torch.arange(1000) * 1e-4
    row = Row(logits=logits, columns={"top_p": 0.6})

    counts = draw_many(row, 40_000)

    assert_follows(counts, expected_scores(row).softmax(-1))
