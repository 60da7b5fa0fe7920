"""Choices, queue limits and deadlines in the engine, step by step on a clock of the test's."""

import gc
import threading
from array import array

import pytest

from runtime import engine as engine_module
from runtime.collector import SWEEP_STEPS, Sweep, calm_collector
from runtime.engine import Engine
from runtime.errors import CapacityError, DeadlineError
from runtime.request import FinishReason, Request
from runtime.sampling_params import fork_seed
from runtime.scheduling.limits import QueueLimits
from runtime.scheduling.policy import FairPolicy
from runtime.structured import NoCompiler
from tests.params import complete_params
from tests.scheduling import OracleExecutor, oracle_continuation
from tests.served import Served

pytestmark = pytest.mark.wire


def test_each_choice_gets_what_its_seed_gives_alone() -> None:
    served = Served()
    prompt = [1, 2, 3, 4, 5, 6]
    served.add(7, prompt, max_tokens=6, n=5)
    served.drain()
    assert [*served.tokens] == [(7, choice) for choice in range(5)]
    for (_, choice), tokens in served.tokens.items():
        seed = fork_seed(7, choice)
        assert tokens == oracle_continuation(prompt, max_tokens=6, seed=seed)
    assert len(served.ends) == 5


def test_cached_tokens_are_told_with_the_end_of_each_choice() -> None:
    served = Served()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    served.add(1, prompt, ignore_eos=True)
    served.drain()
    served.add(2, prompt, ignore_eos=True, n=2)
    served.drain()
    assert [served.ends[key].num_cached_tokens for key in ((1, 0), (2, 0), (2, 1))] == [0, 8, 8]
    stats = served.engine.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (18, 8)
    assert stats.num_cached_blocks > 0


def test_salts_keep_prefixes_apart() -> None:
    served = Served()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for request_id, salt in enumerate(("", "mine", "mine", "yours")):
        served.add(request_id, prompt, cache_salt=salt)
        served.drain()
    assert [served.ends[i, 0].num_cached_tokens for i in range(4)] == [0, 0, 8, 0]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_ends_all_choices(steps: int) -> None:
    served = Served()
    served.add(1, list(range(1, 40)), max_tokens=50, n=3, ignore_eos=True)
    for _ in range(steps):
        served.engine.step()
    before = dict(served.tokens)
    served.engine.abort(served.connection, 1)
    served.engine.abort(served.connection, 1)
    assert not served.engine.has_work
    served.scheduler.check_invariants()
    served.add(1, [5], max_tokens=1)  # the id is free again
    served.drain()
    assert served.tokens[1, 0][-1:] == oracle_continuation([5], max_tokens=1, seed=1)
    assert {key: len(tokens) for key, tokens in before.items() if key[1]} == {
        key: len(tokens) for key, tokens in served.tokens.items() if key[1]
    }


def test_a_full_queue_refuses_with_a_hint_and_harms_nobody() -> None:
    served = Served(max_num_seqs=1, queue=QueueLimits(max_queued_requests=2))
    for request_id in range(4):
        served.add(request_id, [request_id + 1])
    assert list(served.failures) == [3]
    error = served.failures[3]
    assert isinstance(error, CapacityError)
    assert error.retry_after_s >= 0.1
    assert "max_queued_requests=2" in str(error)
    served.drain()
    assert sorted(key[0] for key in served.ends) == [0, 1, 2]
    assert served.engine.stats().num_refused == 1
    served.add(3, [4])  # there is room again
    served.drain()
    assert (3, 0) in served.ends


def test_who_waits_too_long_is_told_and_costs_no_step() -> None:
    served = Served(max_num_seqs=1, queue=QueueLimits(queue_timeout_s=3.0))
    served.add(1, [1], max_tokens=8, ignore_eos=True)
    served.engine.step()
    served.add(2, [2], n=3)
    served.drain()
    error = served.failures[2]
    assert isinstance(error, CapacityError)
    assert "queue_timeout_s=3" in str(error)
    assert list(served.tokens) == [(1, 0)]
    assert served.engine.stats().num_timed_out == 1


def test_a_deadline_that_cannot_be_met_costs_no_step() -> None:
    served = Served(max_num_batched_tokens=8)
    served.add(1, [1], max_tokens=3, ignore_eos=True)
    served.engine.step()  # a step takes a second
    served.add(2, [2] * 30, timeout_s=3.5)  # four steps to its first token
    served.add(3, [3], timeout_s=3.5)
    served.drain()
    assert isinstance(served.failures[2], DeadlineError)
    assert served.ends[3, 0].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    assert all(2 not in key for key in served.tokens)


def test_a_deadline_that_has_passed_is_told_even_where_nothing_else_runs() -> None:
    served = Served()
    served.add(1, [1], timeout_s=0.0)
    served.engine.step()
    assert isinstance(served.failures[1], DeadlineError)
    assert not served.engine.has_work


def test_tenants_take_turns() -> None:
    served = Served(max_num_seqs=1, policy=FairPolicy(quantum=8))
    for request_id in range(6):
        served.add(request_id, [1, 2], tenant="busy", max_tokens=2)
    served.add(6, [1, 2], tenant="other", max_tokens=2)
    served.drain()
    order = [key[0] for key in served.ends]
    assert order.index(6) <= 2


def test_an_idle_engine_checks_itself_and_says_so(monkeypatch) -> None:
    monkeypatch.setattr(engine_module, "IDLE_CHECK_S", 0.01)
    idle = threading.Event()
    served = Served()
    checks = []
    served.scheduler.check_invariants = lambda: checks.append(1)
    engine = Engine(
        model=served.engine.model,
        scheduler=served.scheduler,
        compiler=NoCompiler("a test has no tokenizer"),
        executor=OracleExecutor(served.scheduler.cache.layout),
        on_idle=idle.set,
    )
    engine.start()
    assert idle.wait(30)
    engine.stop()
    assert checks


def test_a_calm_collector_leaves_the_oldest_generation_alone() -> None:
    before = gc.get_threshold()
    try:
        calm_collector()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 1_000_000
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_a_sweep_collects_what_is_young_in_one_of_many_steps() -> None:
    collected = []

    def see(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append(info["generation"])

    sweep = Sweep()
    gc.disable()
    gc.callbacks.append(see)
    try:
        for _ in range(SWEEP_STEPS - 1):
            sweep()
        assert collected == []
        sweep()
        assert collected == [1]
    finally:
        gc.callbacks.remove(see)
        gc.enable()


def test_the_engine_waits_when_the_workers_have_all_that_they_can_get() -> None:
    served = Served()
    in_flight: list[int] = []
    engine = Engine(
        model=served.engine.model,
        scheduler=served.scheduler,
        compiler=NoCompiler("a test has no tokenizer"),
        executor=OracleExecutor(served.scheduler.cache.layout),
        depth=2,
        on_wait=lambda: in_flight.append(served.scheduler.num_in_flight),
    )
    connection = engine.connect(lambda outputs: None)
    params = complete_params(max_tokens=3, ignore_eos=True)
    connection.add(
        Request(request_id=1, prompt_token_ids=array("i", [5, 6]), params=params, seed=1)
    )
    engine.run_submitted()
    while engine.has_work:
        engine.step()
    assert in_flight == [2, 2, 1]


@pytest.mark.parametrize("ended", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_of_one_choice_ends_it_alone(ended: int, steps: int) -> None:
    served = Served()
    prompt = list(range(1, 40))  # takes two steps
    served.add(7, prompt, max_tokens=6, n=3, ignore_eos=True)
    for _ in range(steps):
        served.engine.step()
    before = len(served.tokens.get((7, ended), []))
    served.abort(7, ended)
    served.abort(7, ended)
    served.drain()
    others = {0, 1, 2} - {ended}
    assert {choice for _, choice in served.ends} == others
    for choice in others:
        seed = fork_seed(7, choice)
        wanted = oracle_continuation(prompt, max_tokens=6, seed=seed, ignore_eos=True)
        assert served.tokens[7, choice] == wanted
    assert len(served.tokens.get((7, ended), [])) == before
    served.add(7, [5], max_tokens=1)  # the id is free again
    assert not served.failures


def test_an_abort_of_the_last_choice_ends_the_request() -> None:
    served = Served()
    served.add(1, [1, 2, 3], max_tokens=50, n=2, ignore_eos=True)
    for _ in range(3):
        served.engine.step()
    served.abort(1, 1)
    served.abort(1, 5)  # there is none
    served.abort(2, 0)
    served.engine.step()
    served.abort(1, 0)
    assert not served.engine.has_work
    served.add(1, [5], max_tokens=1)  # the id is free again
    served.drain()
    assert not served.failures


def test_an_abort_that_crosses_with_the_end_is_ignored() -> None:
    served = Served()
    served.add(1, [1, 2, 3], max_tokens=1, n=2, ignore_eos=True)
    while (1, 0) not in served.ends:
        served.engine.step()
    served.abort(1, 0)
    served.drain()
    assert sorted(served.ends) == [(1, 0), (1, 1)]
    served.abort(1, 1)
    assert not served.failures
