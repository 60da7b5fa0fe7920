"""Arrivals, lengths, prefixes, traces, and the prompts made of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulate.prompts import Prompts
from benchmarks.simulate.workload import Workload, read_trace, write_trace
from runtime.errors import ConfigError
from tests.simulation import make_workload, request

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 2.0])
def test_gaps_between_arrivals_have_the_stated_rate_and_spread(burstiness: float) -> None:
    workload = Workload(rate=5.0, num_requests=20_000, burstiness=burstiness)
    arrivals = np.array([each.arrival_s for each in workload.draw()])
    gaps = np.diff(arrivals, prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_lengths_have_the_stated_median_and_95th_percentile() -> None:
    drawn = Workload(num_requests=20_000, prompt_longest=3000).draw()
    prompts = [each.num_prompt_tokens for each in drawn]
    outputs = [each.num_output_tokens for each in drawn]
    assert np.percentile(prompts, (50, 95)) == pytest.approx((500, 2000), rel=0.05)
    assert np.percentile(outputs, (50, 95)) == pytest.approx((150, 600), rel=0.05)
    assert max(prompts) == 3000
    assert min(outputs) >= 1


def test_a_share_of_the_requests_begins_alike() -> None:
    workload = make_workload(num_requests=4000, prefix_share=0.25, num_prefixes=4)
    drawn = workload.draw()
    assert sum(bool(each.prefix) for each in drawn) / 4000 == pytest.approx(0.25, abs=0.03)
    assert len({each.prefix for each in drawn}) == 4 + 1
    plain = replace(workload, prefix_share=0.0).draw()
    for with_prefix, without in zip(drawn, plain, strict=True):
        own = with_prefix.num_prompt_tokens - with_prefix.num_prefix_tokens
        assert own == without.num_prompt_tokens


def test_the_same_seed_draws_the_same_and_another_rate_only_squeezes_it() -> None:
    workload = make_workload()
    assert workload.draw() == make_workload().draw()
    assert workload.draw() != make_workload(seed=1).draw()
    twice = replace(workload, rate=100.0).draw()
    for slow, fast in zip(workload.draw(), twice, strict=True):
        assert fast.arrival_s == pytest.approx(slow.arrival_s / 2)
        assert replace(fast, arrival_s=0.0) == replace(slow, arrival_s=0.0)


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    requests = [
        *make_workload(prefix_share=0.5).draw(),
        request(99.0, tenant="a", priority=-3, prefix="p", num_prefix_tokens=8),
    ]
    write_trace(tmp_path / "trace.jsonl", requests)
    assert read_trace(tmp_path / "trace.jsonl") == requests


def test_a_trace_is_sorted_by_arrival(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", [request(2.0), request(1.0)])
    assert [each.arrival_s for each in read_trace(tmp_path / "trace.jsonl")] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"arrival_s": 0, "num_prompt_tokens": 3}', "num_output_tokens is missing"),
        ('{"arrival_s": 0, "num_prompt_tokens": 3.5, "num_output_tokens": 1}', "of type int"),
        ('{"arrival_s": -1, "num_prompt_tokens": 3, "num_output_tokens": 1}', "arrival_s=-1"),
        ('{"arrival_s": 0, "prompt": 3, "num_output_tokens": 1}', "unknown key 'prompt'"),
        ("[1]", "must be a JSON object"),
        ("{", "line 2"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [request(0.0)])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match="line 2") as raised:
        read_trace(path)
    assert message in str(raised.value)


def test_prompts_are_alike_as_far_as_their_prefixes() -> None:
    prompts = Prompts(vocab_size=50, longest=64)
    same, other = (
        request(0.0, 40, prefix=name, num_prefix_tokens=20) for name in ("same", "other")
    )
    one, two, three = prompts.tokens(0, same), prompts.tokens(1, same), prompts.tokens(2, other)
    assert len(one) == 40
    assert one[:20] == two[:20]
    assert one[20:22] != two[20:22]
    assert one[0] != three[0]
    # No two requests in more than the vocabulary begin alike.
    firsts = {tuple(prompts.tokens(number, request(0.0, 8))[:2]) for number in range(2000)}
    assert len(firsts) == 2000
    assert all(0 <= token < 50 for token in one)
