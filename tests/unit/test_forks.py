"""Choices of one request: they share its prompt's blocks, and get what separate requests would."""

import pytest

from runtime.errors import CapacityError
from runtime.request import FinishReason
from runtime.scheduling.limits import QueueLimits
from runtime.scheduling.output import BlockCopy
from runtime.scheduling.policy import PriorityPolicy
from runtime.scheduling.sequence import Sequence, Status
from tests.scheduling import EOS, Chunk, make_scheduler, make_sequence, oracle_token
from tests.steps import (
    OracleRun,
    assert_right,
    drain,
    finish,
    ids,
    num_used,
    output_of,
    shares,
    step,
)

pytestmark = pytest.mark.unit

PROMPT = list(range(1, 11))  # two blocks of four, and two tokens


def make_family(
    num_choices: int, prompt: list[int] = PROMPT, *, max_tokens: int = 9
) -> tuple[Sequence, ...]:
    source = make_sequence(0, prompt, max_tokens=max_tokens)
    return (source, *(source.fork(index, seed=100 + index) for index in range(1, num_choices)))


def test_choices_share_the_blocks_of_the_prompt() -> None:
    scheduler = make_scheduler(block_size=4)
    source, *forks = make_family(3)
    scheduler.add(source)
    assert shares(step(scheduler)) == [(0, 10)]
    assert num_used(scheduler) == 3
    assert shares(step(scheduler)) == [(0, 1), (1, 1), (2, 1)]
    assert num_used(scheduler) == 2 + 3
    assert [each.status for each in forks] == [Status.RUNNING] * 2


def test_a_partial_block_is_copied_before_the_first_write() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_family(3)[0])
    (first,) = step(scheduler).changed
    output = step(scheduler)
    (source_table,) = first.appended
    tables = {each.sequence_id: each.appended[0] for each in output.changed}
    assert output.copies == tuple(BlockCopy(source_table[2], tables[each][2]) for each in (1, 2))
    assert tables[1][:2] == tables[2][:2] == source_table[:2]
    assert len({source_table[2], tables[1][2], tables[2][2]}) == 3


def test_nothing_is_copied_at_a_block_edge() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_family(3, PROMPT[:9])[0])  # the ninth is computed by each
    step(scheduler)
    output = step(scheduler)
    assert output.copies == ()
    assert num_used(scheduler) == 2 + 3
    assert all(each.num_computed_tokens == 8 for each in output.scheduled)


def test_every_group_has_its_own_copy() -> None:
    scheduler = make_scheduler(block_size=4, windows=(0, 6))
    scheduler.add(make_family(2)[0])
    step(scheduler)
    output = step(scheduler)
    assert len(output.copies) == 2
    (change,) = (each for each in output.changed if each.sequence_id == 1)
    assert change.first_blocks == (0, 1)
    assert [each.target for each in output.copies] == [change.appended[0][2], change.appended[1][1]]


def test_shared_blocks_are_free_once_all_choices_have_ended() -> None:
    scheduler = make_scheduler(block_size=4, prefix_cache=False)
    source = make_family(3)[0]
    scheduler.add(source)
    step(scheduler)
    step(scheduler)
    for sequence_id, used in ((1, 4), (0, 3), (2, 0)):
        scheduler.abort(sequence_id)
        scheduler.check_invariants()
        assert num_used(scheduler) == used


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (5,), (0, Chunk(8)), (Chunk(6),)])
@pytest.mark.parametrize("num_blocks", [7, 12, 64])
@pytest.mark.parametrize("length", [1, 4, 5, 10, 19])
def test_choices_get_what_separate_requests_get(
    prefix_cache: bool, windows: tuple[int, ...], num_blocks: int, length: int
) -> None:
    run = OracleRun(
        make_scheduler(
            num_blocks=num_blocks * len(windows),
            block_size=4,
            windows=windows,
            max_num_batched_tokens=8,
            max_num_seqs=4,
            prefix_cache=prefix_cache,
        )
    )
    family = make_family(4, list(range(1, length + 1)))
    run.finish(family[0])
    assert all(each.status is Status.FINISHED for each in family)
    assert len({tuple(output_of(each)) for each in family}) == 4
    assert_right(family, windows=windows)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_go_on_where_the_source_ends_with_its_first_token(prefix_cache: bool) -> None:
    run = OracleRun(make_scheduler(block_size=4, prefix_cache=prefix_cache))
    seed = next(seed for seed in range(100_000) if oracle_token(PROMPT, seed) == EOS)
    source = make_sequence(0, PROMPT, seed=seed)
    forks = [source.fork(index, seed=index) for index in (1, 2)]
    run.finish(source)
    assert source.finish_reason is FinishReason.STOP
    assert source.num_output_tokens == 1
    assert all(each.num_output_tokens > 1 for each in forks)
    assert_right([source, *forks])


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
@pytest.mark.parametrize("in_flight", [False, True])
def test_choices_go_on_without_an_aborted_source(
    prefix_cache: bool, num_steps: int, in_flight: bool
) -> None:
    run = OracleRun(
        make_scheduler(block_size=4, max_num_batched_tokens=8, prefix_cache=prefix_cache)
    )
    source, *forks = make_family(3)
    run.scheduler.add(source)
    for _ in range(num_steps):
        run.step()
    output = run.scheduler.schedule() if in_flight else None
    run.scheduler.abort(0)
    run.scheduler.check_invariants()
    if output is not None:
        run.scheduler.update(run.executor.execute(run.table.flatten(output)))
    run.finish()
    assert source.finish_reason is FinishReason.ABORT
    assert_right(forks)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_choices_go_on_after_a_crash(prefix_cache: bool, num_steps: int) -> None:
    run = OracleRun(
        make_scheduler(block_size=4, max_num_batched_tokens=8, prefix_cache=prefix_cache)
    )
    family = make_family(3)
    run.scheduler.add(family[0])
    for _ in range(num_steps - 1):
        run.step()
    run.crash()
    run.finish()
    assert_right(family)


@pytest.mark.parametrize("num_steps", [1, 3, 4])
def test_choices_go_on_after_the_source_was_preempted(num_steps: int) -> None:
    run = OracleRun(
        make_scheduler(
            num_blocks=7,
            block_size=4,
            max_num_batched_tokens=8,
            policy=PriorityPolicy(ageing_s=1e9),
        )
    )
    source = make_sequence(0, list(range(1, 20)), max_tokens=6, priority=1)
    family = [source, *(source.fork(each, seed=each) for each in (1, 2))]
    run.scheduler.add(source)
    for _ in range(num_steps):
        run.step()
    urgent = make_sequence(50, [8] * 16, max_tokens=4, seed=5)
    run.scheduler.add(urgent)
    while urgent.status is Status.WAITING:
        run.step()
    assert source.status is Status.WAITING
    assert [each.status for each in family[1:]] == [
        Status.HELD if num_steps < 3 else Status.WAITING
    ] * 2
    run.finish()
    assert source.num_preemptions == 1
    assert_right([urgent, *family])


def test_choices_beyond_max_num_seqs_wait_and_come_before_the_queue() -> None:
    scheduler = make_scheduler(block_size=4, max_num_seqs=2)
    source = make_family(4, max_tokens=2)[0]
    scheduler.add(source)
    for sequence_id in (50, 51):
        scheduler.add(make_sequence(sequence_id, [7] * 8, max_tokens=1))
    order = []
    while scheduler.has_work:
        output = step(scheduler)
        order += ids(output.added)
        assert output.num_scheduled_sequences <= 2
    assert order == [0, 50, 1, 2, 3, 51]


def test_an_aborted_choice_leaves_the_others_alone() -> None:
    run = OracleRun(make_scheduler(block_size=4))
    family = make_family(4)
    run.scheduler.add(family[0])
    run.scheduler.abort(1)  # while it is held
    run.step()
    run.step()
    run.scheduler.abort(2)
    run.finish()
    assert output_of(family[1]) == []
    assert_right([family[0], family[3]])


def test_a_fork_shares_what_others_have_cached() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_sequence(50, PROMPT, max_tokens=1))
    drain(scheduler)
    source = make_family(2)[0]
    scheduler.add(source)
    assert shares(step(scheduler)) == [(0, 2)]
    step(scheduler)
    assert num_used(scheduler) == 2 + 2
    assert source.num_cached_tokens == 8


def test_a_fork_joins_while_the_source_crosses_a_block_edge() -> None:
    run = OracleRun(make_scheduler(block_size=4, max_num_seqs=3))
    blocker = make_sequence(50, [9], max_tokens=4, seed=3, ignore_eos=True)
    family = make_family(3, PROMPT[:8], max_tokens=12)
    run.finish(blocker, family[0])
    assert_right([blocker, *family])


def test_a_window_that_has_moved_on_is_not_shared() -> None:
    run = OracleRun(make_scheduler(block_size=2, windows=(3,), max_num_seqs=2))
    blocker = make_sequence(50, [9], max_tokens=8, seed=3, ignore_eos=True)
    family = make_family(2, max_tokens=16)
    run.scheduler.add(blocker)
    run.scheduler.add(family[0])
    while family[1].status is not Status.RUNNING:
        output = run.step()
    assert output.copies == ()
    assert dict(shares(output))[1] > 1
    run.finish()
    assert_right([blocker, *family], windows=(3,))


def test_copies_are_acknowledged_with_the_step_before_others_may_have_the_blocks() -> None:
    scheduler = make_scheduler(block_size=4)
    scheduler.add(make_family(2)[0])
    step(scheduler)
    output = scheduler.schedule()
    (copy,) = output.copies
    scheduler.abort(0)
    scheduler.abort(1)
    assert num_used(scheduler) == 4
    finish(scheduler, output)
    assert num_used(scheduler) == 0
    assert copy.source != copy.target


def test_refused_choices_leave_no_cycle_behind() -> None:
    scheduler = make_scheduler(max_num_seqs=1, queue=QueueLimits(max_queued_requests=1))
    for sequence_id in (1, 2):
        scheduler.add(make_sequence(sequence_id, PROMPT))
    refused = make_sequence(3, PROMPT)
    refused.fork(4, seed=4)
    with pytest.raises(CapacityError):
        scheduler.add(refused)
    assert refused.forks == ()


def test_held_choices_hold_no_tokens_of_their_own() -> None:
    scheduler = make_scheduler()
    first = make_sequence(1, PROMPT)
    fork = first.fork(2, seed=2)
    scheduler.add(first)
    assert len(fork.token_ids) == 0
    assert fork.num_prompt_tokens == len(PROMPT)
    step(scheduler)
    assert fork.token_ids.tolist() == list(PROMPT)
    assert fork.block_hashes == first.block_hashes
