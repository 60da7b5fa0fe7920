"""On a device a step's sampling waits once, and draws what it draws on the CPU."""

import pytest
import torch

from tests.cpu.test_sampler_batches import mixed_rows
from tests.host_reads import DEVICE, FakeDevice
from tests.sampling import NEVER, Row, arguments, sample, spread_logits
from workers.batch import MaskKind
from workers.models.capture import TO_DEVICE, TO_HOST
from workers.sampling.sampler import Fault, Sampler, Samples

pytestmark = pytest.mark.cpu

EOS = (1, 3)
GREEDY = {"temperature": 0.0}
ONE_COPY = {
    "greedy": [GREEDY],
    "temperature": [{"temperature": 0.8}],
    "top_k": [{"top_k": 20}],
    "top_k and top_p": [{"top_k": 40, "top_p": 0.9, "min_p": 0.01}],
    "top_k of many": [{"top_k": 600}],
    "top_k of all": [{"top_k": 100_000}],
    "min_p": [{"min_p": 0.05}, {"min_p": 0.01, "top_k": 600}, {"min_p": 1.0}],
    "all of them": [GREEDY, {}, {"top_k": 20}, {"top_k": 100, "top_p": 0.5}, {"top_k": 700}],
    "penalties": [{"repetition_penalty": 1.3, "frequency_penalty": 0.5}],
}


def on_device(rows: list[Row]) -> tuple[Samples, list[str]]:
    """Samples, and what needed the host."""
    with torch.inference_mode(), FakeDevice() as device:
        logits, *rest = arguments(rows)
        there = logits.to(DEVICE)
        device.found.clear()
        samples = Sampler(EOS).sample(there, *rest)
        return samples, list(device.found)


def waits(found: list[str]) -> list[str]:
    return [each for each in found if TO_DEVICE not in each]


def rows_of(asks: list[dict], vocabulary: int, count: int = 12) -> list[Row]:
    return [
        Row(
            logits=spread_logits(vocabulary, seed=number),
            columns={**asks[number % len(asks)], "seed": number},
            prompt=[5, 6],
            output=[7, 7],
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("vocabulary", [300, 1024, 5000])
@pytest.mark.parametrize("name", ONE_COPY)
def test_one_copy_brings_all_that_is_drawn(name, vocabulary):
    rows = rows_of(ONE_COPY[name], vocabulary)
    rows[3].logits[vocabulary // 2] = float("nan")
    rows[5].logits[:] = NEVER
    rows[7].logits[7] = float("inf")

    samples, found = on_device(rows)

    (wait,) = waits(found)
    assert TO_HOST in wait
    assert len(found) <= (9 if name == "penalties" else 3)
    here = sample(rows, EOS)
    assert samples.token_ids.equal(here.token_ids)
    assert samples.faults.equal(here.faults)
    assert samples.faults.tolist().count(Fault.INVALID_LOGITS) == 3


@pytest.mark.parametrize(
    "columns",
    [{"top_p": 0.6}, {"top_p": 0.6, "min_p": 0.01}, {"top_k": 700, "top_p": 0.6}],
)
def test_what_top_p_refuses_costs_a_read_an_attempt(columns):
    rows = rows_of([columns], 5000)
    rows[3].logits[17] = float("nan")
    rows[5].logits[:] = NEVER
    rows[7].logits[7] = float("inf")

    samples, found = on_device(rows)

    *attempts, last = waits(found)
    assert TO_HOST in last
    assert 1 < len(attempts) < 20
    assert all("draw.py" in each and "nonzero" in each for each in attempts)
    assert samples.token_ids.equal(sample(rows, EOS).token_ids)


@pytest.mark.parametrize("vocabulary", [211, 1024, 5000])
def test_rows_of_every_kind_are_drawn_as_on_the_cpu(vocabulary):
    rows = mixed_rows(vocabulary)

    samples, found = on_device(rows)

    here = sample(rows, EOS)
    assert samples.token_ids.equal(here.token_ids)
    assert samples.faults.equal(here.faults)
    assert samples.logprobs.top_token_ids.equal(here.logprobs.top_token_ids)
    assert samples.logprobs.logprobs.tolist() == pytest.approx(here.logprobs.logprobs.tolist())
    assert len(found) < 100


def test_equal_tokens_are_those_of_the_lower_ids():
    logits = torch.zeros(2000)
    rows = [
        Row(logits=logits, columns={"top_k": count, "seed": seed})
        for count in (3, 600)
        for seed in range(20)
    ]
    rows += [Row(logits=logits, columns=GREEDY), Row(logits=-logits, columns=GREEDY)]

    samples, _ = on_device(rows)

    assert max(samples.token_ids[:20].tolist()) < 3
    assert 100 < max(samples.token_ids[20:40].tolist()) < 600
    assert samples.token_ids[40:].tolist() == [0, 0]
    assert samples.token_ids.equal(sample(rows).token_ids)


def test_a_row_without_a_token_is_told():
    rows = rows_of([GREEDY, {}, {"top_k": 5}, {"top_p": 0.5}], 600)
    rows = [Row(logits=each.logits, columns=each.columns) for each in rows]
    rows[2] = Row(logits=rows[2].logits, columns=rows[2].columns, mask=(MaskKind.ALLOWED, []))
    rows[3] = Row(logits=rows[3].logits, columns=rows[3].columns, mask=(MaskKind.BITS, []))

    samples, _ = on_device(rows)

    assert samples.faults.tolist() == [0, 0, Fault.EMPTY_SUPPORT, Fault.EMPTY_SUPPORT, *[0] * 8]
    assert samples.token_ids.equal(sample(rows).token_ids)
