import pytest

from runtime.errors import WorkerError
from runtime.request import FinishReason
from runtime.scheduling.output import SchedulerOutput, SequenceUpdate
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Status
from runtime.scheduling.step_plan import StepResult
from tests.scheduling import EOS, make_scheduler, make_sequence

pytestmark = pytest.mark.unit


def finish_step(
    scheduler: Scheduler, output: SchedulerOutput, token: int = 5
) -> list[SequenceUpdate]:
    tokens = {each.sequence.sequence_id: (token,) for each in output.scheduled if each.samples}
    updates = scheduler.update(StepResult(step_id=output.step_id, token_ids=tokens))
    scheduler.check_invariants()
    return updates


def step(scheduler: Scheduler, token: int = 5) -> SchedulerOutput:
    output = scheduler.schedule()
    assert output is not None
    finish_step(scheduler, output, token)
    return output


def shares(output: SchedulerOutput) -> list[tuple[int, int]]:
    return [(each.sequence.sequence_id, each.num_scheduled_tokens) for each in output.scheduled]


def test_a_prompt_longer_than_the_budget_is_fed_in_chunks() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_sequence(1, range(1, 21)))
    outputs = [step(scheduler) for _ in range(4)]
    assert [shares(output) for output in outputs] == [[(1, 8)], [(1, 8)], [(1, 4)], [(1, 1)]]
    assert [output.scheduled[0].num_computed_tokens for output in outputs] == [0, 8, 16, 20]


def test_running_sequences_come_before_new_ones_in_one_batch() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_sequence(1, [1, 2, 3]))
    step(scheduler)
    scheduler.add(make_sequence(2, range(1, 11)))
    assert shares(step(scheduler)) == [(1, 1), (2, 7)]
    assert shares(step(scheduler)) == [(1, 1), (2, 3)]
    assert shares(step(scheduler)) == [(1, 1), (2, 1)]


def test_max_num_seqs_bounds_who_runs() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for sequence_id in (1, 2, 3):
        scheduler.add(make_sequence(sequence_id, [1]))
    assert shares(step(scheduler)) == [(1, 1), (2, 1)]
    assert [each.sequence_id for each in scheduler.waiting] == [3]


def test_admission_reserves_the_whole_prompt_and_the_watermark() -> None:
    scheduler = make_scheduler(num_blocks=10, watermark=0.2, max_num_batched_tokens=64)
    scheduler.add(make_sequence(1, [1] * 16))  # 4 of 10 blocks
    scheduler.add(make_sequence(2, [1] * 20))  # 5, which leaves 1: less than the watermark's 2
    assert shares(step(scheduler)) == [(1, 16)]
    scheduler.abort(1)
    assert shares(step(scheduler)) == [(2, 20)]


def test_a_sequence_alone_may_fill_the_pool() -> None:
    scheduler = make_scheduler(num_blocks=4, watermark=0.5)
    scheduler.add(make_sequence(1, [1] * 16))
    assert shares(step(scheduler)) == [(1, 16)]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=4)
    old, young, queued = (make_sequence(sequence_id, [1] * 7) for sequence_id in (1, 2, 3))
    for sequence in (old, young, queued):
        scheduler.add(sequence)
    step(scheduler)  # two blocks each: the pool is full
    step(scheduler)
    output = step(scheduler)  # the ninth token of the old one needs a block
    assert shares(output) == [(1, 1)]
    assert output.removed == (2,)
    assert young.status is Status.WAITING
    assert young.num_computed_tokens == 0
    assert young.num_output_tokens == 2
    assert list(scheduler.waiting) == [young, queued]
    assert scheduler.num_preemptions == 1


def test_finish_reasons() -> None:
    scheduler = make_scheduler(max_model_len=6)
    by_length = make_sequence(1, [1, 2], max_tokens=2)
    by_eos = make_sequence(2, [1, 2])
    by_limit = make_sequence(3, [1, 2, 3], max_tokens=100, ignore_eos=True)
    for sequence in (by_length, by_eos, by_limit):
        scheduler.add(sequence)
    step(scheduler)
    step(scheduler, token=EOS)
    step(scheduler, token=EOS)
    assert by_length.finish_reason is FinishReason.STOP  # EOS beats the length it also reached
    assert by_eos.finish_reason is FinishReason.STOP
    assert by_limit.finish_reason is FinishReason.LENGTH
    assert by_limit.token_ids == [1, 2, 3, 5, EOS, EOS]
    assert not scheduler.has_work


@pytest.mark.parametrize("times", [1, 2])
def test_abort_in_every_state(times: int) -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting, finished = (make_sequence(i, [1], max_tokens=i) for i in (3, 2, 1))
    scheduler.add(finished)
    step(scheduler)
    scheduler.add(running)
    step(scheduler)
    scheduler.add(waiting)
    for _ in range(times):
        for sequence_id in (1, 2, 3, 99):
            scheduler.abort(sequence_id)
            scheduler.check_invariants()
    assert running.finish_reason is waiting.finish_reason is FinishReason.ABORT
    assert finished.finish_reason is FinishReason.LENGTH
    assert scheduler.schedule() is None
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks


def test_abort_while_its_step_is_in_flight_frees_blocks_only_afterwards() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, [1, 2]))
    output = scheduler.schedule()
    scheduler.abort(1)
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks - 1
    assert finish_step(scheduler, output) == []
    assert scheduler.cache.pool.num_free == scheduler.cache.pool.num_blocks


def test_a_result_for_other_sequences_is_a_worker_error() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(1, [1]))
    output = scheduler.schedule()
    with pytest.raises(WorkerError, match=r"tokens for sequences \[2\], wanted for \[1\]"):
        scheduler.update(StepResult(step_id=output.step_id, token_ids={2: (5,)}))


def test_restart_keeps_order_and_tokens() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(sequence_id, [1, 2]) for sequence_id in (1, 2, 3)]
    for sequence in sequences:
        scheduler.add(sequence)
    step(scheduler)
    scheduler.schedule()
    scheduler.restart()
    scheduler.check_invariants()
    assert list(scheduler.waiting) == sequences
    assert shares(step(scheduler)) == [(1, 3), (2, 3), (3, 3)]
