"""Engines in virtual time, and who gets a request."""

from dataclasses import replace

import pytest

from benchmarks.simulate.plot import mean_occupancy
from benchmarks.simulate.request_log import Slo
from benchmarks.simulate.router import LeastLoaded, PrefixAffinity, RoundRobin
from benchmarks.simulate.run import Run, run
from benchmarks.simulate.search import find_replicas
from benchmarks.simulate.summary import Summary
from benchmarks.simulate.timeline import Timeline
from tests.simulation import FLOOR, SLO, lens, make_deployment, make_workload, request, serve

pytestmark = pytest.mark.unit


def test_a_lone_request_takes_its_steps_and_nothing_else() -> None:
    deployment = make_deployment()
    log = serve(deployment, [request(3.0, prompt=32, output=3)]).log
    prefill = deployment.cost.step(lens(0), lens(32), num_samples=1).total_s
    decodes = [deployment.cost.step(lens(n), lens(1), num_samples=1).total_s for n in (32, 33)]
    assert log.ttft_s[0] == pytest.approx(prefill)
    assert log.last_s[0] - log.first_s[0] == pytest.approx(sum(decodes))
    assert log.tpot_s[0] == pytest.approx(sum(decodes) / 2)
    assert sorted(log.itl_s) == pytest.approx(sorted(decodes))


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    deployment = make_deployment()
    step_s = deployment.cost.step(lens(0), lens(32), num_samples=1).total_s
    log = serve(deployment, [request(0.0), request(0.25 * step_s)]).log
    assert log.first_s[1] == pytest.approx(2 * step_s)


def test_a_request_in_its_last_step_still_loads_its_replica() -> None:
    deployment = make_deployment(num_replicas=2)
    step_s = deployment.cost.step(lens(0), lens(32), num_samples=1).total_s
    requests = [request(0.0), request(0.5 * step_s), request(3 * step_s)]
    first, second = serve(deployment, requests).timelines
    assert list(first.start_s) == pytest.approx([0.0, 3 * step_s])
    assert list(second.start_s) == pytest.approx([0.5 * step_s])


def test_an_idle_replica_starts_when_a_request_comes() -> None:
    log = serve(make_deployment(), [request(0.0), request(500.0)]).log
    assert log.ttft_s[1] == pytest.approx(log.ttft_s[0])


def test_occupancy_is_what_sequences_hold_during_the_step() -> None:
    replicas = serve(make_deployment(kv_memory=100 * 16 * 114_688), [request(0.0, 160, 1)])
    (timeline,) = replicas.timelines
    assert list(timeline.occupancy) == pytest.approx([10 / 100])


def test_the_same_seed_gives_the_same_figures() -> None:
    deployment = make_deployment(num_replicas=2)
    first = run(deployment, make_workload(prefix_share=0.5, num_requests=20).draw(), SLO).summary
    assert (
        run(deployment, make_workload(prefix_share=0.5, num_requests=20).draw(), SLO).summary
        == first
    )
    assert run(deployment, make_workload(seed=1, num_requests=20).draw(), SLO).summary != first


@pytest.mark.full
def test_more_replicas_are_never_slower() -> None:
    requests = make_workload(rate=400.0, num_requests=120).draw()
    p99 = [
        run(make_deployment(num_replicas=count), requests, SLO).summary.ttft_p99_ms
        for count in (1, 2, 4)
    ]
    assert p99[0] > p99[1] > p99[2]


def test_shared_prefixes_are_found_in_the_cache() -> None:
    requests = [
        request(float(number), 96, 2, prefix="p", num_prefix_tokens=64) for number in range(10)
    ]
    summary = run(make_deployment(), requests, SLO).summary
    assert summary.prefix_hit_rate == pytest.approx(9 * 64 / (10 * 96))
    off = run(make_deployment(prefix_cache=False), requests, SLO).summary
    assert off.prefix_hit_rate == 0
    assert off.ttft_p50_ms > summary.ttft_p50_ms


def test_a_small_cache_preempts_and_still_answers_everybody() -> None:
    deployment = make_deployment(
        kv_memory=40 * 16 * 114_688, max_model_len=600, watermark=0.0, max_num_partial_prefills=8
    )
    requests = [request(0.0, 60, 200) for _ in range(8)]
    summary = run(deployment, requests, SLO).summary
    assert summary.num_preemptions > 0
    assert summary.occupancy_max > 0.9
    assert summary.output_tokens_per_s * summary.duration_s == pytest.approx(8 * 200)


def test_who_is_refused_counts_as_not_served() -> None:
    deployment = make_deployment(max_num_seqs=1, max_queued_requests=2)
    result = run(deployment, [request(0.0, output=50) for _ in range(10)], Slo(ttft_s=9, tpot_s=9))
    assert result.summary.num_refused == result.failures["CapacityError"] == 7
    assert result.summary.good_share == pytest.approx(0.3)


def test_a_request_over_the_models_length_is_refused() -> None:
    result = run(make_deployment(max_model_len=64), [request(0.0), request(0.1, 64)], SLO)
    assert result.failures == {"InvalidRequestError": 1}


def test_good_is_who_met_both_slos() -> None:
    deployment = make_deployment(constants=replace(FLOOR, overhead_us=10_000.0))
    requests = [request(0.0, output=1), request(1.0, output=5)]

    def good_share(*, ttft_s: float, tpot_s: float) -> float:
        return run(deployment, requests, Slo(ttft_s=ttft_s, tpot_s=tpot_s)).summary.good_share

    assert good_share(ttft_s=0.02, tpot_s=0.02) == 1.0
    assert good_share(ttft_s=0.02, tpot_s=0.005) == 0.5  # an answer of one token has no TPOT
    assert good_share(ttft_s=0.005, tpot_s=0.02) == 0.0


def test_mean_occupancy_is_zero_where_a_replica_idles() -> None:
    busy, idle = Timeline(), Timeline()
    busy.start_s.append(5.0)
    busy.seconds.append(5.0)
    busy.occupancy.append(0.8)
    times, values = mean_occupancy([busy, idle])
    assert values[times < 5.0].max() == 0
    assert values[times > 5.0] == pytest.approx(0.4)


def test_round_robin_takes_turns() -> None:
    router = RoundRobin()
    assert [router.choose(request(0.0), [9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]


def test_least_loaded_takes_the_first_of_the_least() -> None:
    assert LeastLoaded().choose(request(0.0), [3, 1, 1]) == 1


def test_prefix_affinity_stays_until_its_replica_is_much_busier() -> None:
    router = PrefixAffinity()
    same = request(0.0, prefix="p", num_prefix_tokens=8)
    home = router.choose(same, [0, 0, 0, 0])
    loads = [4, 4, 4, 4]
    assert router.choose(same, loads) == home
    loads[home] = 9
    assert router.choose(same, loads) != home
    homes = {
        router.choose(request(0.0, prefix=f"{n}", num_prefix_tokens=8), [0] * 4) for n in range(40)
    }
    assert homes == {0, 1, 2, 3}


def test_prefix_affinity_finds_more_in_the_cache_than_turns() -> None:
    requests = make_workload(prefix_share=1.0, num_prefixes=4, num_requests=40).draw()
    deployment = make_deployment(num_replicas=4)
    hits = {
        name: run(replace(deployment, router=name), requests, SLO).summary.prefix_hit_rate
        for name in ("prefix", "round_robin")
    }
    assert hits["prefix"] > hits["round_robin"] > 0


@pytest.fixture(scope="module")
def a_run() -> Run:
    return run(make_deployment(), [request(0.0)], SLO)


@pytest.mark.parametrize("enough", [1, 2, 5, 8, 13])
def test_the_search_finds_the_fewest_and_has_tried_one_less(a_run: Run, enough: int) -> None:
    def serve_by(count: int) -> Summary:
        return replace(a_run.summary, good_share=0.995 if count >= enough else 0.9)

    search = find_replicas(serve_by, good_share=0.99, max_replicas=13)
    assert search.answer == enough
    assert enough == 1 or enough - 1 in search.tries


def test_the_search_gives_up_at_the_most(a_run: Run) -> None:
    tried = []

    def serve_by(count: int) -> Summary:
        tried.append(count)
        return replace(a_run.summary, good_share=0.5)

    assert find_replicas(serve_by, good_share=0.99, max_replicas=6).answer is None
    assert tried == [1, 2, 4, 6]
