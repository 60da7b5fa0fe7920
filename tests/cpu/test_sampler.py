"""Distribution, exactness of the filters, and independence of batch mates."""

import pytest
import torch

from tests.sampling import make_rows, mixed_batch, pick, sample, spread_logits
from workers import sampler
from workers.errors import WorkerError
from workers.sampler import gumbel, most_probable, row_keys, total_mass

pytestmark = pytest.mark.cpu

SEEDS = 40_000
CHUNK = 2_000

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


def draw_many(logits: torch.Tensor, **parameters) -> torch.Tensor:
    """Counts of tokens over many seeds."""
    counts = torch.zeros(len(logits), dtype=torch.int64)
    for start in range(0, SEEDS, CHUNK):
        rows = make_rows(CHUNK, seed=torch.arange(start, start + CHUNK), **parameters)
        tokens = sample(logits.expand(CHUNK, -1).clone(), rows)
        counts += tokens.bincount(minlength=len(logits))
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


def test_free_draws_follow_the_softmax():
    logits = spread_logits(300)

    counts = draw_many(logits, temperature=0.7)

    assert_follows(counts, (logits / 0.7).softmax(-1))


def test_draws_in_two_levels_follow_the_softmax():
    """5,000 tokens: the last of ten segments is not full."""
    logits = spread_logits(5000, scale=3.0)

    counts = draw_many(logits, temperature=1.0)

    assert_follows(counts, logits.softmax(-1))


def test_the_chi_square_test_can_fail():
    logits = spread_logits(300)
    counts = draw_many(logits, temperature=1.0)

    with pytest.raises(AssertionError):
        assert_follows(counts, (logits / 1.1).softmax(-1))


def test_top_k_draws_follow_the_softmax_of_exactly_k():
    logits = spread_logits(300)
    kept = torch.zeros(300).index_fill(0, logits.topk(20).indices, 1).bool()

    counts = draw_many(logits, top_k=20)

    assert (counts > 0).sum() == 20
    assert_follows(counts, logits.masked_fill(~kept, float("-inf")).softmax(-1))


@pytest.mark.parametrize("vocabulary", [300, 5000])
def test_top_p_draws_follow_the_softmax_of_the_nucleus(vocabulary):
    logits = spread_logits(vocabulary)
    ordered, order = logits.softmax(-1).double().sort(descending=True)
    size = int((ordered.cumsum(0) < 0.6).sum()) + 1
    kept = torch.zeros(vocabulary).index_fill(0, order[:size], 1).bool()

    counts = draw_many(logits, top_p=0.6)

    assert_follows(counts, logits.masked_fill(~kept, float("-inf")).softmax(-1))


def test_successive_positions_draw_independently():
    logits = torch.zeros(4)
    first = sample(logits.expand(SEEDS, -1).clone(), make_rows(SEEDS, position=7))
    second = sample(logits.expand(SEEDS, -1).clone(), make_rows(SEEDS, position=8))

    assert_follows((first * 4 + second).bincount(minlength=16), torch.full((16,), 1 / 16))


@pytest.mark.parametrize("vocabulary", [211, 5000, 32000])
def test_a_row_draws_the_same_alone_permuted_and_in_part(vocabulary):
    logits, rows = mixed_batch(vocabulary)
    everyone = sample(logits.clone(), rows)

    alone = torch.cat(
        [
            sample(logits[i : i + 1].clone(), pick(rows, torch.tensor([i])))
            for i in range(len(logits))
        ]
    )
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(2))
    permuted = sample(logits[order], pick(rows, order))
    part = order[:7]
    in_part = sample(logits[part], pick(rows, part))

    assert alone.equal(everyone)
    assert permuted.equal(everyone[order])
    assert in_part.equal(everyone[part])


def test_the_mass_of_a_row_is_the_same_alone_to_the_last_bit():
    """Of one long row torch adds the parts that its threads sum up."""
    values = torch.randn(5, 262144, generator=torch.Generator().manual_seed(0)) * 4
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    together = total_mass(values)
    alone = torch.cat([total_mass(row[None]) for row in values])
    torch.set_num_threads(threads)

    assert alone.equal(together)
    assert together == pytest.approx(values.double().exp().sum(-1), rel=1e-14)


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = torch.zeros(2, 5000)
    logits[1, [17, 4000]] = 1

    assert sample(logits, make_rows(2, temperature=0.0)).tolist() == [0, 17]


def test_the_logits_are_left_as_they_were():
    logits, rows = mixed_batch(300)
    before = logits.clone()

    sample(logits, rows)

    assert logits.equal(before)


def test_equal_tokens_are_kept_by_the_lower_id():
    values = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])

    ids, kept = most_probable(values, torch.tensor([3, 2]))

    assert ids[0].tolist() == [1, 2, 3]
    assert ids[1, :2].tolist() == [0, 1]
    assert kept[1].tolist() == [5.0, 5.0, float("-inf")]


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    """Probabilities 1/2, 1/4, 1/8, 1/8: 0.75 is reached by two tokens, 0.76 needs the third."""
    logits = torch.tensor([0.125, 0.5, 0.125, 0.25]).log()

    def seen(top_p: float) -> set[int]:
        return set(draw_many(logits, top_p=top_p).nonzero().flatten().tolist())

    assert seen(0.74) == {1, 3}
    assert seen(0.76) == {0, 1, 3}
    assert seen(1e-30) == {1}


def test_a_flat_nucleus_wider_than_the_first_guess():
    """9,000 equal tokens: 0.5 keeps the lower half, far more than the guess of 1,024."""
    tokens = sample(torch.zeros(200, 9000), make_rows(200, top_p=0.5))

    assert int(tokens.max()) < 4500
    assert int(tokens.max()) > 4000


@pytest.mark.parametrize("temperature", [1e-38, 1e-4, 1e30])
def test_extreme_temperatures_stay_finite(temperature):
    logits = spread_logits(300)

    tokens = sample(logits.expand(50, -1).clone(), make_rows(50, temperature=temperature))

    if temperature < 1:
        assert set(tokens.tolist()) == {int(logits.argmax())}
    else:
        assert len(set(tokens.tolist())) > 20


def test_forbidden_tokens_are_never_drawn():
    logits = torch.full((5000,), float("-inf"))
    logits[[3, 4999]] = 0.0

    for parameters in ({}, {"top_k": 10}, {"top_p": 0.99}):
        tokens = sample(logits.expand(200, -1).clone(), make_rows(200, **parameters))
        assert set(tokens.tolist()) == {3, 4999}


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_name_their_sequence(value, temperature):
    logits = torch.zeros(3, 10)
    logits[1] = value

    with pytest.raises(WorkerError, match="sequence 1"):
        sample(logits, make_rows(3, temperature=temperature))


def test_the_noise_is_what_it_always_was():
    """Changes of the hash change every seeded answer: this pins it."""
    keys = row_keys(torch.tensor([0, 1, -1]), torch.tensor([0, 1, 2]))

    noise = gumbel(keys, 0, torch.tensor([0, 1, 1 << 20]))

    assert keys.tolist() == KEYS
    assert noise.flatten().tolist() == pytest.approx(NOISE, abs=1e-12)


def test_the_hash_is_splitmix64():
    """First output of the reference implementation with state 0."""
    assert sampler._mix(torch.tensor([sampler.GAMMA])).item() % (1 << 64) == 0xE220A8397B1DCDAF
