"""The oracle: the same tokens in every arrangement, through flatten, cache and scheduler."""

from collections.abc import Callable

import pytest

from runtime.scheduling.policy import FairPolicy, FcfsPolicy, Policy, PriorityPolicy
from runtime.scheduling.sequence import Sequence
from tests.scheduling import Chunk, make_scheduler, make_sequence, oracle_continuation
from tests.steps import OracleRun, assert_right, output_of

pytestmark = pytest.mark.unit

# What the oracle raises where it reads a token that was never written, which is -1.
NEVER_WRITTEN = OverflowError
# The third begins as the seventh, the fifth as the eighth.
PROMPTS = [
    [3],
    [1, 2, 3, 4],
    list(range(5, 38)),
    [9] * 17,
    list(range(100, 150)),
    [8, 8],
    list(range(5, 30)),
    list(range(100, 141)),
]


def make_sequences() -> list[Sequence]:
    """Of several tenants, classes and salts, some in several choices; all choices."""
    sequences = []
    for index, prompt in enumerate(PROMPTS):
        sequence = make_sequence(
            index,
            prompt,
            max_tokens=12,
            seed=index,
            priority=index % 3,
            tenant=str(index % 2),
            cache_salt="a" if index == 3 else "",
            params={"prompt_logprobs": 0} if index == 6 else None,
        )
        sequences.append(sequence)
        sequences += [
            sequence.fork(100 * each + index, seed=1000 * each + index)
            for each in range(1, index % 3)
        ]
    return sequences


def add(run: OracleRun, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        if sequence.fork_of is None:
            run.scheduler.add(sequence)


def test_alone() -> None:
    for sequence in make_sequences():
        if sequence.fork_of is None:
            sequence.forks = []
            run = OracleRun(make_scheduler())
            run.finish(sequence)
            assert_right([sequence])
            assert output_of(sequence) == oracle_continuation(
                PROMPTS[sequence.sequence_id], max_tokens=12, seed=sequence.seed
            )


@pytest.mark.parametrize(
    "windows",
    [(0,), (0, 0, 0), (0, 6), (7,), (3, 10), (0, Chunk(8)), (Chunk(6),), (Chunk(9), 4, Chunk(12))],
)
@pytest.mark.parametrize("budget", [8, 9, 64])
@pytest.mark.parametrize("num_blocks", [16, 60])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_batched_chunked_and_preempted(
    windows: tuple[int, ...], budget: int, num_blocks: int, prefix_cache: bool
) -> None:
    run = OracleRun(
        make_scheduler(
            num_blocks=num_blocks * len(windows),
            windows=windows,
            max_num_batched_tokens=budget,
            prefix_cache=prefix_cache,
        )
    )
    sequences = make_sequences()
    add(run, sequences)
    run.finish()
    assert_right(sequences, windows=windows)


@pytest.mark.parametrize(
    "make_policy", [FcfsPolicy, lambda: PriorityPolicy(ageing_s=1.0), lambda: FairPolicy(quantum=9)]
)
@pytest.mark.parametrize("partial", [1, 3])
@pytest.mark.parametrize("threshold", [None, 3])
def test_in_the_order_of_every_policy(
    make_policy: Callable[[], Policy], partial: int, threshold: int | None
) -> None:
    run = OracleRun(
        make_scheduler(
            num_blocks=20,
            max_num_batched_tokens=12,
            max_num_partial_prefills=partial,
            long_prefill_token_threshold=threshold,
            watermark=0.1,
            policy=make_policy(),
        )
    )
    sequences = make_sequences()
    for sequence in reversed(sequences):  # the least urgent come first
        if sequence.fork_of is None:
            run.scheduler.add(sequence)
            run.step()
    run.finish()
    assert_right(sequences)


def test_the_small_pool_above_does_preempt() -> None:
    run = OracleRun(make_scheduler(num_blocks=16, max_num_batched_tokens=64))
    add(run, make_sequences())
    run.finish()
    assert run.scheduler.running.num_preemptions > 0


def test_in_a_second_round_from_the_prefix_cache() -> None:
    run = OracleRun(make_scheduler(num_blocks=200))
    add(run, make_sequences())
    run.finish()
    again = make_sequences()
    for sequence in again:
        sequence.sequence_id += 1000
    add(run, again)
    run.finish()
    assert sum(each.num_cached_tokens for each in again) > 100
    assert_right(again)


@pytest.mark.parametrize("crash_at", [1, 4, 9])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (0, Chunk(10))])
def test_after_a_crash(crash_at: int, windows: tuple[int, ...]) -> None:
    run = OracleRun(make_scheduler(num_blocks=34 * len(windows), windows=windows))
    sequences = make_sequences()
    add(run, sequences)
    for _ in range(crash_at - 1):
        run.step()
    run.crash()
    run.crash()
    run.finish()
    assert_right(sequences, windows=windows)


def test_the_oracle_sees_a_wrong_block() -> None:
    run = OracleRun(make_scheduler())
    (group,) = run.table._groups
    change = group.change
    group.change = lambda row, first, blocks: change(row, first, [each // 2 for each in blocks])
    sequences = make_sequences()
    add(run, sequences)
    run.finish()
    with pytest.raises(AssertionError, match=r"Sequence\("):
        assert_right(sequences)


@pytest.mark.parametrize("length", [10, 11])
def test_the_oracle_sees_a_copy_that_is_missing(length: int) -> None:
    run = OracleRun(make_scheduler(block_size=4))
    source = make_sequence(1, range(1, 1 + length))
    source.fork(2, seed=1)
    run.scheduler.add(source)
    run.step()
    run.scheduler.running.take_changes = without_copies(run.scheduler.running.take_changes)
    with pytest.raises(NEVER_WRITTEN):
        run.finish()


def without_copies(take_changes: Callable[[], tuple]) -> Callable[[], tuple]:
    return lambda: (*take_changes()[:-1], [])


def test_the_oracle_sees_a_cache_that_was_lost_without_a_word() -> None:
    run = OracleRun(make_scheduler())
    sequences = make_sequences()
    add(run, sequences)
    run.step()
    run.executor.restart()
    with pytest.raises(NEVER_WRITTEN):
        run.finish()
