"""Arrivals, and what is made of streams that a client saw."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.clients import Answer, FailedRequest
from benchmarks.serve.arrivals import Arrival, of_trace, poisson
from benchmarks.serve.load import Outcome, offer
from benchmarks.serve.plot import plot
from benchmarks.serve.summary import HEADERS, Goals, sum_up
from benchmarks.workloads.shapes import make_uniform
from benchmarks.workloads.workload import WorkloadRequest
from runtime.errors import ConfigError

pytestmark = pytest.mark.unit

WORKLOAD = make_uniform(model="m", vocab_size=5000, num_requests=3, prompt_len=4, output_len=2)


def test_random_arrivals_are_the_same_for_a_seed_and_have_the_rate() -> None:
    load = poisson(WORKLOAD, requests_per_s=50.0, num_requests=2000, seed=3)
    assert load == poisson(WORKLOAD, requests_per_s=50.0, num_requests=2000, seed=3)
    assert load != poisson(WORKLOAD, requests_per_s=50.0, num_requests=2000, seed=4)
    times = [each.after_s for each in load.arrivals]
    assert times == sorted(times)
    assert 2000 / times[-1] == pytest.approx(50, rel=0.1)
    # Where the workload begins again no prompt is one that was computed before.
    assert len({each.request.prompt for each in load.arrivals}) == 2000


def test_a_trace_gives_times_lengths_and_shared_beginnings(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 9.0, "num_prompt_tokens": 8, "num_output_tokens": 3},
        {"arrival_s": 5.0, "num_prompt_tokens": 6, "num_output_tokens": 2},
        {"arrival_s": 7.0, "num_prompt_tokens": 7, "num_output_tokens": 1},
    ]
    for line in lines[:2]:
        line |= {"prefix": "chat", "num_prefix_tokens": 4}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    load = of_trace(path, vocab_size=5000, seed=0)
    assert [each.after_s for each in load.arrivals] == [0.0, 2.0, 4.0]
    assert load.requests_per_s == 0.5
    first, second, third = (each.request for each in load.arrivals)
    assert [len(each.prompt) for each in (first, second, third)] == [6, 7, 8]
    assert [each.output_len for each in (first, second, third)] == [2, 1, 3]
    assert first.prompt[:4] == third.prompt[:4] != second.prompt[:4]
    path.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ConfigError, match="arrivals at two times"):
        of_trace(path, vocab_size=5000, seed=0)


class Scripted:
    """Answers what it is asked for; a prompt of one token fails, one of two gets too little."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def complete(self, prompt: Sequence[int], output_len: int) -> Answer:
        self.asked.append(len(prompt))
        if len(prompt) == 1:
            raise FailedRequest("429: full")
        return Answer(0.0, output_len - (len(prompt) == 2), [1.0, 2.0])


def test_each_request_is_sent_and_one_that_fails_stops_no_other() -> None:
    client, ended = Scripted(), []
    arrivals = [Arrival(0.0, WorkloadRequest((1,) * length, 5)) for length in (3, 1, 2, 4)]
    outcomes, seconds = asyncio.run(offer(client, arrivals, on_end=lambda: ended.append(1)))
    assert client.asked == [3, 1, 2, 4]
    assert len(ended) == 4
    assert [each.detail for each in outcomes] == ["", "429: full", "4 tokens came, of 5", ""]
    assert [each.answer is None for each in outcomes] == [False, True, True, False]
    assert seconds > 0


def outcomes() -> list[Outcome]:
    """First tokens after 0.1, 0.2, 0.4 s; later ones 0.1 s apart; and a failure."""
    answers = [Answer(0.0, 5, [ttft_s, ttft_s + 0.2, ttft_s + 0.4]) for ttft_s in (0.1, 0.2, 0.4)]
    answers.append(Answer(0.0, 1, [0.3]))
    return [*(Outcome(each, "", 0.001) for each in answers), Outcome(None, "full", 0.05)]


def test_latencies_are_of_answers_and_goodput_of_those_that_met_both_goals() -> None:
    goals = Goals(ttft_s=0.25, tpot_s=0.15)
    found = sum_up(outcomes(), offered_per_s=10, seconds=2.0, goals=goals)
    assert found.finished_per_s == 2.0
    assert found.goodput_per_s == 1.0
    assert found.output_tokens_per_s == 8.0
    assert found.latencies_ms["ttft", 50] == pytest.approx(250)
    assert found.latencies_ms["tpot", 50] == pytest.approx(100)
    assert found.latencies_ms["itl", 99] == pytest.approx(200)
    assert found.metrics()["failed"] == 1
    assert found.metrics()["e2e_ms_p50"] == pytest.approx(550)
    assert found.row().count("|") == len(HEADERS) + 1
    strict = sum_up(
        outcomes(), offered_per_s=10, seconds=2.0, goals=Goals(ttft_s=None, tpot_s=0.05)
    )
    # One of a single token has no time per later token to miss.
    assert strict.goodput_per_s == 0.5


def test_a_sweep_is_drawn_also_where_a_rate_had_no_answer(tmp_path: Path) -> None:
    goals = Goals(ttft_s=None, tpot_s=None)
    good = sum_up(outcomes(), offered_per_s=10, seconds=2.0, goals=goals)
    bad = sum_up(outcomes()[-1:], offered_per_s=20, seconds=2.0, goals=goals)
    assert bad.latencies_ms == {}
    assert bad.finished_per_s == 0
    path = tmp_path / "sweep.png"
    plot(path, "title", [good, bad])
    assert path.read_bytes().startswith(b"\x89PNG")
