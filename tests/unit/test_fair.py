"""Tenants take turns, by tokens."""

from collections import Counter

import pytest

from runtime.scheduling import policy as policy_module
from runtime.scheduling.policy import FairPolicy, Policy
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Status
from tests.scheduling import EOS, make_scheduler, make_sequence
from tests.steps import ids, step

pytestmark = pytest.mark.unit


def make_fair(policy: Policy, **options: int) -> Scheduler:
    return make_scheduler(
        num_blocks=4096, max_num_batched_tokens=64, prefix_cache=False, policy=policy, **options
    )


def admitted_tokens(scheduler: Scheduler, num_steps: int, *, token: int = 5) -> list[Counter[str]]:
    """Prompt and output tokens of those that have ended, by tenant, after each step."""
    totals: list[Counter[str]] = [Counter()]
    for _ in range(num_steps):
        running = list(scheduler.running.sequences.values())
        output = step(scheduler, token=token)
        total = totals[-1].copy()
        for sequence in {*running, *output.added}:
            if sequence.status is Status.FINISHED:
                total[sequence.tenant] += sequence.num_tokens
        totals.append(total)
    return totals


@pytest.mark.parametrize("sizes", [{"a": 10, "b": 30}, {"a": 5, "b": 63, "c": 20}])
@pytest.mark.parametrize("quantum", [16, 100])
def test_tenants_get_equal_shares_of_tokens(sizes: dict[str, int], quantum: int) -> None:
    scheduler = make_fair(FairPolicy(quantum=quantum))
    sequence_id = 0
    for tenant, size in sizes.items():  # the first comes with all of its requests first
        for _ in range(3000 // size):
            sequence_id += 1
            scheduler.add(make_sequence(sequence_id, [1] * size, max_tokens=1, tenant=tenant))
    bound = 2 * quantum + 2 * max(sizes.values()) + scheduler.limits.max_num_batched_tokens
    for total in admitted_tokens(scheduler, 60):
        shares_of = [total[tenant] for tenant in sizes]
        assert max(shares_of) - min(shares_of) <= bound
    assert min(shares_of) > 2 * bound


def test_what_a_request_did_not_use_is_given_back() -> None:
    scheduler = make_fair(FairPolicy(quantum=20), max_num_seqs=4)
    for sequence_id in range(400):  # they ask for ten times what they use
        tenant, max_tokens = ("a", 200) if sequence_id % 2 else ("b", 1)
        scheduler.add(make_sequence(sequence_id, [1] * 16, max_tokens=max_tokens, tenant=tenant))
    total = admitted_tokens(scheduler, 40, token=EOS)[-1]
    assert total["a"] + total["b"] > 2000
    assert abs(total["a"] - total["b"]) <= 2 * 216


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    scheduler = make_fair(FairPolicy(quantum=16))
    for sequence_id in range(200):
        scheduler.add(make_sequence(sequence_id, [1] * 15, max_tokens=1, tenant="busy"))
    scheduler.add(make_sequence(1000, [1] * 15, max_tokens=1, tenant="idle"))
    for _ in range(20):
        step(scheduler)
    for sequence_id in range(1001, 1101):
        scheduler.add(make_sequence(sequence_id, [1] * 15, max_tokens=1, tenant="idle"))
    total = admitted_tokens(scheduler, 10)[-1]
    assert total["idle"] <= total["busy"] + 2 * 16


def test_a_tenant_that_comes_later_is_not_behind_all_of_the_others() -> None:
    scheduler = make_fair(FairPolicy(quantum=64), max_num_seqs=2)
    for sequence_id in range(100):
        scheduler.add(make_sequence(sequence_id, [1] * 31, max_tokens=1, tenant="busy"))
    step(scheduler)
    late = make_sequence(1000, [1] * 31, max_tokens=1, tenant="late")
    scheduler.add(late)
    for _ in range(3):
        step(scheduler)
    assert late.status is Status.FINISHED


def test_each_of_many_tenants_is_served_once_a_round() -> None:
    scheduler = make_fair(FairPolicy(quantum=8), max_num_seqs=4)
    num_tenants = 50
    for sequence_id in range(3 * num_tenants):  # a tenant's three requests come together
        tenant = str(sequence_id // 3)
        scheduler.add(make_sequence(sequence_id, [1] * 7, max_tokens=1, tenant=tenant))
    served: list[str] = []
    while scheduler.has_work:
        served += [each.tenant for each in step(scheduler).added]
    for round_start in range(0, 3 * num_tenants, num_tenants):
        assert len(set(served[round_start : round_start + num_tenants])) == num_tenants


def test_a_request_far_larger_than_a_turn_is_served() -> None:
    scheduler = make_fair(FairPolicy(quantum=1))
    scheduler.add(make_sequence(1, [1] * 30, tenant="large"))
    scheduler.add(make_sequence(2, [1] * 20, tenant="other"))
    assert ids(step(scheduler).added) == [2, 1]


@pytest.mark.timeout(5)
def test_turns_that_nobody_can_pay_for_are_not_taken_one_by_one(monkeypatch) -> None:
    monkeypatch.setattr(policy_module, "_cost", lambda sequence: sequence.max_num_tokens)
    policy = FairPolicy(quantum=1)
    for sequence_id, cost in ((1, 10**9 + 5), (2, 10**9)):
        sequence = make_sequence(sequence_id, [1], tenant=str(sequence_id))
        sequence.max_num_tokens = cost
        policy.push(sequence)
    assert ids(policy.order()) == [2, 1]


def test_fair_keeps_the_order_within_a_tenant_and_returns_the_preempted_first() -> None:
    policy = FairPolicy(quantum=10)
    sequences = [make_sequence(each, [1] * 5, tenant="a") for each in (1, 2, 3)]
    served = []
    for sequence in sequences:
        policy.push(sequence)
    policy.remove(sequences[0])
    policy.push_front(sequences[0])
    while len(policy):
        first = next(iter(policy.order()))
        served.append(first)
        policy.remove(first)
        policy.charge(first)
    assert served == sequences


@pytest.mark.parametrize("max_tokens", [16, 1000, 100_000])
def test_a_newcomer_waits_for_no_credit_of_one_that_was_alone(max_tokens: int) -> None:
    policy = FairPolicy(quantum=8)
    scheduler = make_scheduler(policy=policy, max_num_seqs=2, num_blocks=256)
    for sequence_id in range(200):
        scheduler.add(make_sequence(sequence_id, [1] * 4, max_tokens=max_tokens, tenant="a"))
    for _ in range(40):
        step(scheduler, token=EOS)  # answers are far shorter than they might be
    scheduler.add(make_sequence(999, [1] * 4, max_tokens=max_tokens, tenant="b"))
    added = [each for _ in range(4) for each in ids(step(scheduler, token=EOS).added)]
    assert 999 in added


def test_aborted_requests_leave_no_credit() -> None:
    policy = FairPolicy(quantum=8)
    scheduler = make_scheduler(policy=policy, max_num_seqs=1, num_blocks=64)
    for sequence_id in range(5):
        scheduler.add(make_sequence(sequence_id, [1] * 4, max_tokens=100_000, tenant="x"))
        step(scheduler)
        scheduler.abort(sequence_id)
    for sequence_id in range(10, 40):
        scheduler.add(make_sequence(sequence_id, [1] * 4, max_tokens=1, tenant="x"))
    scheduler.add(make_sequence(99, [1] * 4, max_tokens=1, tenant="b"))
    added = [each for _ in range(6) for each in ids(step(scheduler).added)]
    assert 99 in added


def test_one_tenant_alone_is_not_held_up_by_its_head() -> None:
    scheduler = make_scheduler(policy=FairPolicy(), num_blocks=20, max_num_batched_tokens=64)
    scheduler.add(make_sequence(0, [9] * 5, max_tokens=40))
    step(scheduler)
    scheduler.add(make_sequence(1, [1] * 76, max_tokens=4))
    scheduler.add(make_sequence(2, [2, 3], max_tokens=3))
    assert ids(step(scheduler).added) == [2]
