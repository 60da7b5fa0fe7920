"""No bit of a row's token and logprobs depends on its batch mates; no logit stays changed."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.quick import quick
from tests.sampling import NEVER, Row, arguments, sample, spread_logits
from workers.batch import MaskKind
from workers.sampling import history, segments
from workers.sampling.masses import Bounds, Scale, segment_masses, whole_grains
from workers.sampling.sampler import Fault, Sampler, Samples
from workers.sampling.segments import SegmentedRows

pytestmark = pytest.mark.cpu

EOS = (1, 3)


def mixed_rows(vocabulary: int, count: int = 48) -> list[Row]:
    """Rows of every kind, damaged ones among them."""
    chance = random.Random(vocabulary)

    def some(number: int) -> list[int]:
        return [chance.randrange(vocabulary) for _ in range(number)]

    columns = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.8, "top_k": min(40, vocabulary - 1)},
        {"temperature": 1.3, "top_p": 0.9},
        {"top_k": 3, "top_p": 0.5},
        {"temperature": 2.0, "top_k": 1 << 20},
        {"min_p": 0.05},
        {"top_p": 0.2, "min_p": 0.01},
        {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"presence_penalty": 1.0, "top_p": 0.8},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"top_k": 600},
        {"top_k": 129, "top_p": 0.7},
        {"top_k": 513, "top_p": 0.9, "repetition_penalty": 1.1},
        {"temperature": 1.5, "top_k": vocabulary - 1, "top_p": 0.95, "min_p": 0.001},
        {"top_k": 2000, "min_p": 0.02},
    ]
    masks = [None, None, (MaskKind.ALLOWED, some(5)), (MaskKind.FORBIDDEN, some(5))]
    masks += [None, (MaskKind.BITS, some(vocabulary))]
    rows = []
    for number in range(count):
        output = some(chance.randrange(1, 20))
        columns_of_row = {
            **columns[number % len(columns)],
            "seed": chance.randrange(-(1 << 63), 1 << 63),
            "min_length": 40 * (number % 5 == 0),
            "num_logprobs": number % 4 - 1,
        }
        rows.append(
            Row(
                logits=spread_logits(vocabulary, seed=number, scale=chance.choice([0.3, 2, 6])),
                position=number,
                columns=columns_of_row,
                biases=dict.fromkeys(some(3), 2.5) if number % 3 == 0 else {},
                mask=masks[number % len(masks)],
                grammar=masks[number // 2 % len(masks)],
                bad_words=[[output[-1], token] for token in some(3)],
                prompt=some(10),
                output=output,
            )
        )
    rows[7].logits[vocabulary // 2] = float("nan")
    rows[11].logits[:] = NEVER
    rows[13] = replace(rows[13], mask=(MaskKind.ALLOWED, []))
    return rows


def answers(samples: Samples) -> list[tuple[object, ...]]:
    """Of each row its token, fault and logprobs, bit for bit."""
    result: list[tuple[object, ...]] = []
    told = {row: place for place, row in enumerate(samples.logprobs.rows.tolist())}
    for row, token in enumerate(samples.token_ids.tolist()):
        answer: tuple[object, ...] = (token, int(samples.faults[row]))
        if row in told:
            place = told[row]
            tops = int(samples.logprobs.num_tops[place])
            answer += (
                samples.logprobs.logprobs[place].item(),
                samples.logprobs.top_token_ids[place, :tops].tolist(),
                samples.logprobs.top_logprobs[place, :tops].tolist(),
            )
        result.append(answer)
    return result


def answer_to(rows: Sequence[Row]) -> list[tuple[object, ...]]:
    return answers(sample(rows, EOS))


@pytest.mark.parametrize("vocabulary", quick([7, 211, 1000, 4096, 5000, 32000], 211, 32000))
def test_a_row_is_answered_the_same_alone_permuted_and_in_part(vocabulary):
    rows = mixed_rows(vocabulary)
    everyone = answer_to(rows)

    alone = [answer_to([row])[0] for row in rows]
    order = random.Random(2).sample(range(len(rows)), len(rows))
    permuted = answer_to([rows[number] for number in order])
    in_part = answer_to([rows[number] for number in order[:7]])

    assert alone == everyone
    assert permuted == [everyone[number] for number in order]
    assert in_part == [everyone[number] for number in order[:7]]
    assert {answer[1] for answer in everyone} == set(Fault)


@pytest.mark.parametrize("vocabulary", [1000, 32000])
def test_the_width_of_a_top_k_changes_nothing_for_others(vocabulary):
    """Equal tokens at the last place of some among them."""
    widths = (1, 31, 32, 33, 128, 129, 300, 512, 513, 600, 999, vocabulary - 1, vocabulary, 0)
    rows = [
        Row(
            logits=(spread_logits(vocabulary, seed=number) * 4).round() / 4,
            columns={"top_k": width, "top_p": top_p, "seed": number},
        )
        for number, (width, top_p) in enumerate((w, p) for w in widths for p in (1.0, 0.9))
    ]
    everyone = answer_to(rows)

    assert [answer_to([row])[0] for row in rows] == everyone
    assert answer_to(rows[::-1]) == everyone[::-1]
    assert answer_to(rows[3::5]) == everyone[3::5]


@pytest.mark.parametrize("vocabulary", quick([5000, 32000], 5000))
def test_nothing_depends_on_how_much_is_looked_at_at_once(vocabulary, monkeypatch):
    rows = mixed_rows(vocabulary)
    everyone = answer_to(rows)

    for elements in (1 << 12, 1 << 15, 1 << 23):
        monkeypatch.setattr(segments, "CPU_PIECE", elements)
        assert answer_to(rows) == everyone


def test_nothing_depends_on_the_threads():
    rows = mixed_rows(32000)
    threads = torch.get_num_threads()
    try:
        by_threads = []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            by_threads.append([answer_to(rows), answer_to(rows[:10])])
    finally:
        torch.set_num_threads(threads)

    assert by_threads[0][0][:10] == by_threads[0][1]
    assert all(each == by_threads[0] for each in by_threads[1:])


@pytest.mark.parametrize("threads", quick([1, 2, 3], 3))
def test_the_masses_of_a_row_are_the_same_alone_to_the_last_bit(threads):
    values = torch.randn(5, 70_000, generator=torch.Generator().manual_seed(0)) * 4
    rows = SegmentedRows(values)
    index = torch.arange(5)
    scale = Scale(rows.best, torch.tensor([1.0, 0.7, 1.3, 2.0, 0.1]))
    bounds = Bounds(values[:, 4567], torch.full((5,), 4567))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = segment_masses(rows, index, scale, bounds)
        alone = [
            segment_masses(rows, each, scale.take(each), bounds.take(each))
            for each in index.split(1)
        ]
    finally:
        torch.set_num_threads(before)

    assert torch.cat(alone).equal(together)
    ids = torch.arange(70_000)
    exact = ((values - rows.best[:, None]) / scale.temperature[:, None]).double().exp()
    exact = exact.masked_fill(~bounds.admits(values, ids), 0).sum(-1)
    assert together.double().sum(-1) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("threads", quick([1, 2, 3, 5], 3))
def test_powers_have_the_same_bits_wherever_they_stand(threads):
    """Of numbers whose power is another at the end of what a thread computes, where such are."""
    numbers = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    by_vector = numbers[:, None].repeat(1, 64).exp2()[:, 0]
    single = torch.cat([number.exp2() for number in numbers.split(1)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for number in numbers[single != by_vector][:2]:
            for count in range(1, 700, 23):
                size = whole_grains(count, torch.device("cpu")) * segments.SEGMENT
                assert len(number.expand(size).contiguous().exp2().unique()) == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("vocabulary", [1024, 1300])
def test_masses_within_bounds_at_the_edges_of_segments(vocabulary):
    """Tokens of four values: most have equals on both sides of the bound."""
    values = torch.randint(4, (1, vocabulary), generator=torch.Generator().manual_seed(0)).float()
    rows = SegmentedRows(values)
    ids = torch.arange(vocabulary)
    for bound_id in (0, 1, 511, 512, 513, 1023, 1024, vocabulary - 1, vocabulary):
        for value in (NEVER, 0.0, 1.0, 3.0, 4.0):
            bounds = Bounds(torch.tensor([value]), torch.tensor([bound_id]))
            masses = segment_masses(
                rows, torch.tensor([0]), Scale(rows.best, torch.tensor([0.5])), bounds
            )
            exact = ((values - rows.best) / 0.5).exp() * bounds.admits(values, ids)
            assert masses.sum().item() == pytest.approx(exact.sum().item(), rel=1e-5)


def test_counts_of_tokens_do_not_outlive_their_batch(monkeypatch):
    """Once in the output costs less than what the second best lacks, twice costs more."""
    logits = torch.zeros(600).index_fill(0, torch.tensor(7), 1.0)
    columns = {"temperature": 0.0, "frequency_penalty": 0.6}
    once = Row(logits=logits, columns=columns, prompt=[7, 7], output=[7, 8])
    twice = replace(once, output=[7, 9, 7])
    rows = [once, twice, replace(once, output=[8]), once, twice]

    for elements in (1, 1300, 1 << 22):
        monkeypatch.setattr(history, "COUNTED_ELEMENTS", elements)
        sampler = Sampler(EOS)
        for _ in range(2):
            samples = sampler.sample(*arguments(rows))
            assert samples.token_ids.tolist() == [7, 0, 7, 7, 0]


@pytest.mark.parametrize("vocabulary", [300, 5000])
def test_the_logits_are_left_as_they_were(vocabulary):
    logits, *rest = arguments(mixed_rows(vocabulary))
    before = logits.clone()

    Sampler(EOS).sample(logits, *rest)

    assert logits.view(torch.int32).equal(before.view(torch.int32))


def test_logits_may_be_a_view():
    """As a rank has them that cuts a padded vocabulary."""
    rows = mixed_rows(1000)
    logits, *rest = arguments(rows)
    padded = torch.full((len(rows), 1040), float("nan"))
    padded[:, :1000] = logits
    turned = logits.t().contiguous().t()

    assert answers(Sampler(EOS).sample(padded[:, :1000], *rest)) == answer_to(rows)
    assert answers(Sampler(EOS).sample(turned, *rest)) == answer_to(rows)
    assert padded[:, 1000:].isnan().all()


def test_a_sampler_remembers_no_batch():
    rows = mixed_rows(5000)
    sampler = Sampler(EOS)
    for part in (rows, rows[20:], rows[:3], rows):
        assert answers(sampler.sample(*arguments(part))) == answer_to(part)


def test_no_rows_have_no_tokens():
    logits, positions, columns, inputs, masks = arguments([Row(logits=torch.zeros(600))])
    nobody = torch.zeros(0, dtype=torch.int64)

    samples = Sampler(EOS).sample(logits[:0], positions[:0], columns.take(nobody), inputs, masks)

    assert len(samples.token_ids) == len(samples.faults) == len(samples.logprobs.rows) == 0
    assert len(Sampler(EOS).score(logits[:0], nobody, nobody).rows) == 0
