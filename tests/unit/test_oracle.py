"""The oracle: the same tokens in every arrangement, through flatten, cache and scheduler."""

import pytest

from runtime.scheduling.flatten import BatchTable
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence
from tests.scheduling import OracleExecutor, make_scheduler, make_sequence, oracle_continuation

pytestmark = pytest.mark.unit

PROMPTS = [[3], [1, 2, 3, 4], list(range(5, 38)), [9] * 17, list(range(100, 150)), [8, 8]]


def run(
    scheduler: Scheduler, sequences: list[Sequence], *, crash_at: int | None = None
) -> OracleExecutor:
    layout = scheduler.cache.layout
    executor = OracleExecutor(layout)
    table = BatchTable(max_num_seqs=scheduler.max_num_seqs, num_groups=len(layout.groups))
    for sequence in sequences:
        scheduler.add(sequence)
    while (output := scheduler.schedule()) is not None:
        plan = table.flatten(output)
        if output.step_id == crash_at:
            scheduler.restart()
            executor.restart()
            continue
        scheduler.update(executor.execute(plan))
        scheduler.check_invariants()
    return executor


def sequences() -> list[Sequence]:
    return [
        make_sequence(index, prompt, max_tokens=12, seed=index)
        for index, prompt in enumerate(PROMPTS)
    ]


def expected() -> list[list[int]]:
    return [
        oracle_continuation(prompt, max_tokens=12, seed=index)
        for index, prompt in enumerate(PROMPTS)
    ]


def outputs(ran: list[Sequence]) -> list[list[int]]:
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in ran]


def test_alone() -> None:
    for sequence, tokens in zip(sequences(), expected(), strict=True):
        run(make_scheduler(), [sequence])
        assert outputs([sequence]) == [tokens]


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("budget", [8, 9, 64])
@pytest.mark.parametrize("num_blocks", [34, 60])
def test_batched_chunked_and_preempted(num_groups: int, budget: int, num_blocks: int) -> None:
    ran = sequences()
    scheduler = make_scheduler(
        num_blocks=num_blocks * num_groups, num_groups=num_groups, max_num_batched_tokens=budget
    )
    run(scheduler, ran)
    assert outputs(ran) == expected()


def test_the_small_pool_above_does_preempt() -> None:
    scheduler = make_scheduler(num_blocks=34, max_num_batched_tokens=64)
    run(scheduler, sequences())
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("crash_at", [1, 4, 9])
def test_after_a_crash(crash_at: int) -> None:
    ran = sequences()
    run(make_scheduler(num_blocks=34), ran, crash_at=crash_at)
    assert outputs(ran) == expected()


def test_the_oracle_sees_a_wrong_block() -> None:
    scheduler = make_scheduler()
    ran = sequences()
    original = scheduler.cache.pool.allocate
    scheduler.cache.pool.allocate = lambda count: [0] * count if original(count) else None
    run_unchecked(scheduler, ran)
    assert outputs(ran) != expected()


def run_unchecked(scheduler: Scheduler, ran: list[Sequence]) -> None:
    scheduler.check_invariants = lambda: None
    scheduler.cache.pool.release = lambda blocks: None
    run(scheduler, ran)
