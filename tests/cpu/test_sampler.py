"""Ties, edges, masks and faults of single rows, and the noise."""

import pytest
import torch

from tests.sampling import NEVER, Row, arguments, make_masks, sample, spread_logits
from workers.batch import NO_INPUTS, NO_MASKS, MaskKind
from workers.sampling import noise, sampler
from workers.sampling.draw import Draws, Narrowing
from workers.sampling.masses import Scale
from workers.sampling.noise import gumbel, row_keys
from workers.sampling.sampler import Fault, Sampler
from workers.sampling.segments import SegmentedRows

pytestmark = pytest.mark.cpu

KEYS = [7450421197402424322, -512898370130075971, 2976047945639191205]
NOISE = [
    3.5390187563142,
    0.56885494876198,
    1.05597184355649,
    2.66975341646494,
    1.8863793170407,
    -0.01332751304481,
    0.26741718603913,
    1.35521367809143,
    0.23041362974686,
]


def tokens_of(row: Row, seeds: int = 300) -> set[int]:
    """All that are drawn over the seeds."""
    samples = sample([row.asking(seed=seed) for seed in range(seeds)])
    assert not samples.faults.any()
    return set(samples.token_ids.tolist())


def test_greedy_takes_the_lowest_of_equal_tokens():
    equal = torch.zeros(5000)
    two = equal.index_fill(0, torch.tensor([517, 4999]), 1)
    rows = [Row(logits=each, columns={"temperature": 0}) for each in (equal, two, two[100:])]

    assert sample(rows[:2]).token_ids.tolist() == [0, 517]
    assert sample(rows[2:]).token_ids.tolist() == [417]


@pytest.mark.parametrize("vocabulary", [300, 512, 5000])
def test_few_logits_and_many_are_drawn_alike(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only the best are asked for, few go another way; ties and faults are the same."""
    equal = torch.zeros(vocabulary)
    last = torch.tensor([vocabulary - 1])
    logits = [equal, equal.index_fill(0, torch.tensor([7, 11]), 2.0), spread_logits(vocabulary)]
    logits += [equal.index_fill(0, last, value) for value in (1.0, NEVER, float("nan"), -NEVER)]
    logits.append(torch.full((vocabulary,), NEVER))
    rows = [Row(logits=each, columns={"temperature": 0}) for each in logits]

    ways = []
    for few in (len(rows) * vocabulary, len(rows) * vocabulary - 1):
        monkeypatch.setattr(sampler, "FEW", few)
        ways.append(sample(rows))

    assert ways[0].token_ids.equal(ways[1].token_ids)
    assert ways[0].faults.equal(ways[1].faults)
    assert ways[0].token_ids[:4].tolist() == [0, 7, int(logits[2].argmax()), vocabulary - 1]
    assert ways[0].faults.tolist() == [0, 0, 0, 0, 0, *[Fault.INVALID_LOGITS] * 3]


def test_columns_that_stay_are_not_all_that_a_step_asks_for():
    """Steps of the same sequences share their columns; masks and lengths are a step's own."""
    row = Row(logits=torch.arange(300.0), columns={"temperature": 0})
    one = Sampler([299])
    logits, positions, columns, inputs, masks = arguments([row])
    for _ in range(2):
        assert one.sample(logits, positions, columns, NO_INPUTS, NO_MASKS).token_ids == 299

    no_best = make_masks([(MaskKind.FORBIDDEN, [299])], 300)
    assert one.sample(logits, positions, columns, inputs, no_best).token_ids == 298
    assert one.sample(logits, positions, columns, inputs, masks).token_ids == 299

    _, _, columns, *_ = arguments([row.asking(min_length=5)])
    for position, token in ((5, 299), (4, 298)):
        at = torch.tensor([position])
        assert one.sample(logits, at, columns, NO_INPUTS, NO_MASKS).token_ids == token


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("places", [[2, 3, 5, 7, 11], [4, 600, 601, 1100, 1900]])
def test_of_a_five_way_tie_top_3_keeps_the_lowest_ids(batch, places):
    row = Row(logits=torch.zeros(2000).index_fill(0, torch.tensor(places), 4), columns={"top_k": 3})
    seen = set()
    for start in range(0, 320, batch):
        rows = [row.asking(seed=seed) for seed in range(start, start + batch)]
        seen |= set(sample(rows).token_ids.tolist())

    assert seen == set(places[:3])


@pytest.mark.parametrize("vocabulary", [300, 9000])
def test_of_equal_tokens_top_p_keeps_the_lowest_ids(vocabulary):
    """Half of the mass is the lower half of the tokens."""
    seen = tokens_of(Row(logits=torch.zeros(vocabulary), columns={"top_p": 0.5}))

    assert vocabulary * 0.45 < max(seen) < vocabulary // 2


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    """Probabilities 1/2, 1/4, 1/8, 1/8: 0.75 is reached by two tokens, 0.76 needs the third."""
    row = Row(logits=torch.tensor([0.125, 0.5, 0.125, 0.25]).log())

    assert tokens_of(row.asking(top_p=0.74)) == {1, 3}
    assert tokens_of(row.asking(top_p=0.76)) == {0, 1, 3}
    assert tokens_of(row.asking(top_p=1e-30)) == {1}


def test_min_p_1_keeps_the_best_alone():
    row = Row(logits=spread_logits(5000))

    for columns in ({"min_p": 1.0}, {"min_p": 1.0, "top_p": 0.9}, {"min_p": 1.0, "top_k": 9}):
        assert tokens_of(row.asking(**columns, temperature=0.7)) == {int(row.logits.argmax())}


@pytest.mark.parametrize("columns", [{}, {"top_p": 0.99}, {"top_k": 4000}, {"min_p": 1e-9}])
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-4, 1e30, 3e38])
def test_extreme_temperatures_stay_finite(temperature, columns):
    row = Row(logits=spread_logits(5000))

    seen = tokens_of(row.asking(temperature=temperature, **columns))

    if temperature < 1:
        assert seen == {int(row.logits.argmax())}
    else:
        assert len(seen) > 200


def test_logits_far_apart_stay_finite():
    logits = torch.tensor([-3e38, 3e38, 0.0] * 600)

    for columns in ({}, {"top_p": 0.5}, {"top_k": 5}, {"repetition_penalty": 1e-3}):
        row = Row(logits=logits, columns=columns, prompt=[1, 4])
        assert all(token % 3 == 1 for token in tokens_of(row))


@pytest.mark.parametrize("columns", [{}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.1}])
def test_tokens_without_probability_are_never_drawn(columns):
    logits = torch.full((5000,), NEVER)
    logits[[3, 4999]] = 0.0

    assert tokens_of(Row(logits=logits, columns=columns)) == {3, 4999}


@pytest.mark.parametrize("vocabulary", [7, 31, 32, 1000, 5000])
@pytest.mark.parametrize("columns", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.9}])
def test_masks_of_all_kinds_are_the_same_as_no_probability(vocabulary, columns):
    """An allowed list, bits, and what is forbidden: one set, and never another token."""
    logits = spread_logits(vocabulary)
    allowed = [*range(0, vocabulary, 3), vocabulary - 1]
    forbidden = sorted(set(range(vocabulary)) - set(allowed))
    without = logits.index_fill(0, torch.tensor(forbidden), NEVER)
    masks = [
        (MaskKind.ALLOWED, allowed),
        (MaskKind.BITS, allowed),
        (MaskKind.FORBIDDEN, forbidden),
    ]

    for seed in range(20):
        bare = Row(logits=without, columns={**columns, "seed": seed})
        rows = [Row(logits=logits, columns=bare.columns, mask=mask) for mask in masks]
        rows += [Row(logits=logits, columns=bare.columns, grammar=mask) for mask in masks]
        assert len(set(sample([bare, *rows]).token_ids.tolist())) == 1


def test_masks_of_both_places_hold():
    row = Row(
        logits=torch.zeros(1200),
        mask=(MaskKind.BITS, [1, 40, 700, 1100]),
        grammar=(MaskKind.ALLOWED, [0, 40, 700, 1101]),
    )

    assert tokens_of(row) == {40, 700}


def test_bad_words_need_all_their_tokens_in_order():
    logits = torch.zeros(8)
    row = Row(
        logits=logits,
        prompt=[1],
        output=[2, 3],
        bad_words=[[3, 0], [2, 3, 1], [1, 2, 3, 2], [0, 1, 2, 3, 4], [2, 5], [3, 2, 6]],
    )
    other = Row(logits=logits, bad_words=[[3, 0], [2, 3, 1]])

    assert tokens_of(row) == {3, 4, 5, 6, 7}
    assert tokens_of(other) == set(range(8))


def test_history_without_a_penalty_changes_nothing():
    rows = [Row(logits=spread_logits(600), prompt=[4, 5], output=[6])] * 2
    rows[1] = rows[1].asking(repetition_penalty=1.5)

    plain = sample([Row(logits=spread_logits(600))])

    assert sample(rows).token_ids[0] == plain.token_ids[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "all -inf"])
@pytest.mark.parametrize("columns", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}])
def test_damaged_logits_are_the_fault_of_their_row_alone(value, columns):
    logits = torch.stack([spread_logits(600, seed=seed) for seed in range(4)])
    rows = [Row(logits=each, columns={**columns, "num_logprobs": 2}) for each in logits]
    sound = sample(rows)
    damaged = logits[2].clone()
    damaged[:] = NEVER if value == "all -inf" else damaged
    damaged[599] = NEVER if value == "all -inf" else value
    rows[2] = Row(logits=damaged, columns=rows[2].columns, mask=(MaskKind.FORBIDDEN, [599]))

    samples = sample(rows)

    assert samples.faults.tolist() == [0, 0, Fault.INVALID_LOGITS, 0]
    assert samples.token_ids[2] == 0
    mates = torch.tensor([0, 1, 3])
    assert samples.token_ids[mates].equal(sound.token_ids[mates])
    assert samples.logprobs.rows.tolist() == mates.tolist()
    assert samples.logprobs.logprobs.equal(sound.logprobs.logprobs[mates])


@pytest.mark.parametrize("mask", [None, (MaskKind.ALLOWED, [2, 5])])
@pytest.mark.parametrize(
    "columns",
    [{"temperature": 0}, {}, {"top_k": 5}, {"top_k": 550}, {"top_p": 0.9}, {"min_p": 0.1}],
)
def test_biases_that_make_a_logit_infinite_are_the_fault_of_their_row_alone(columns, mask):
    logits = spread_logits(600)
    logits[5] = 1e38
    rows = [Row(logits=logits, columns={**columns, "num_logprobs": 0}, mask=mask)] * 3
    sound = sample(rows)
    rows[1] = Row(logits=logits, columns=rows[1].columns, mask=mask, biases={5: 3.4e38})

    samples = sample(rows)

    assert samples.faults.tolist() == [0, Fault.INVALID_LOGITS, 0]
    assert samples.token_ids.tolist() == [sound.token_ids[0], 0, sound.token_ids[2]]
    assert samples.logprobs.rows.tolist() == [0, 2]


def test_rows_that_refuse_every_token_end_nonetheless():
    """No parameter asks for this: the cut is above all tokens, and so the best is refused, too."""
    rows = SegmentedRows(spread_logits(600)[None])
    nobody = torch.zeros(1, dtype=torch.int64)
    one = torch.ones(1)
    draws = Draws(
        rows=rows,
        index=nobody,
        scale=Scale(rows.best, one),
        top_k=nobody,
        top_p=one.double() / 2,
        cutoff=rows.best + 1,
        keys=nobody,
    )

    with pytest.raises(AssertionError, match="1 rows refuse all of 128 tokens"):
        Narrowing(draws).draw()


@pytest.mark.parametrize("columns", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9}])
@pytest.mark.parametrize(
    "asked",
    [
        {"mask": (MaskKind.ALLOWED, [])},
        {"mask": (MaskKind.BITS, [])},
        {"mask": (MaskKind.FORBIDDEN, range(20))},
        {"mask": (MaskKind.ALLOWED, [3, 4]), "grammar": (MaskKind.BITS, [5])},
        {"biases": dict.fromkeys(range(20), NEVER)},
        {"mask": (MaskKind.ALLOWED, [3]), "prompt": [1, 2], "bad_words": [[2, 3]]},
    ],
)
def test_a_row_without_a_token_is_a_fault_of_that_row_alone(columns, asked):
    logits = spread_logits(20)
    rows = [Row(logits=logits, columns={**columns, "num_logprobs": 0}) for _ in range(3)]
    sound = sample(rows)
    rows[1] = Row(logits=logits, columns=rows[1].columns, **asked)

    samples = sample(rows)

    assert samples.faults.tolist() == [0, Fault.EMPTY_SUPPORT, 0]
    assert samples.token_ids.tolist() == [sound.token_ids[0], 0, sound.token_ids[2]]
    assert samples.logprobs.rows.tolist() == [0, 2]


def test_the_noise_is_what_it_always_was():
    """Changes of the hash change every seeded answer: this pins it."""
    keys = row_keys(torch.tensor([0, 1, -1]), torch.tensor([0, 1, 2]))

    values = gumbel(keys, 0, torch.tensor([0, 1, 1 << 20]))

    assert keys.tolist() == KEYS
    assert values.flatten().tolist() == pytest.approx(NOISE, abs=1e-12)


def test_the_hash_is_splitmix64():
    """First output of the reference implementation with state 0."""
    assert noise._mix(torch.tensor([noise.GAMMA])).item() % (1 << 64) == 0xE220A8397B1DCDAF
