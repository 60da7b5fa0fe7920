"""What the scheduler says of how long requests take."""

from itertools import pairwise

import pytest

from runtime.histogram import HistogramSnapshot
from runtime.request import FinishReason, Start
from runtime.scheduling.output import StepOutcome
from tests.scheduling import OracleExecutor, make_scheduler, make_sequence, make_table

pytestmark = pytest.mark.unit

STEP_S = 2.0


class Run:
    """A scheduler whose steps take STEP_S, and whose clock is moved by hand between them."""

    def __init__(self, **options: int) -> None:
        self.scheduler = make_scheduler(**options)
        self.now = 100.0
        self._executor = OracleExecutor(self.scheduler.cache.layout)
        self._table = make_table(max_num_seqs=8, num_groups=1)

    def add(
        self, sequence_id: int, prompt: list[int], *, num_forks: int = 0, max_tokens: int = 8
    ) -> None:
        sequence = make_sequence(
            sequence_id, prompt, max_tokens=max_tokens, ignore_eos=True, submitted_s=self.now
        )
        for index in range(1, num_forks + 1):
            sequence.fork(sequence_id + index, seed=index)
        self.scheduler.add(sequence, self.now)

    def step(self) -> StepOutcome:
        output = self.scheduler.schedule(self.now)
        assert output is not None
        result = self._executor.execute(self._table.flatten(output))
        self.now += STEP_S
        return self.scheduler.update(result, self.now)

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.step()
        self.scheduler.check_invariants()


def values_of(snapshot: HistogramSnapshot) -> tuple[int, float]:
    """How many, and their sum."""
    return snapshot.count, snapshot.sum


def test_a_request_is_timed_from_its_arrival() -> None:
    run = Run()
    run.add(1, [1, 2, 3], max_tokens=3)
    run.now += 5.0
    run.drain()
    latencies = run.scheduler.latencies
    assert values_of(latencies.queue_s.snapshot()) == (1, 5.0)
    assert values_of(latencies.ttft_s.snapshot()) == (1, 5.0 + STEP_S)
    assert values_of(latencies.itl_s.snapshot()) == (2, 2 * STEP_S)
    assert values_of(latencies.e2e_s.snapshot()) == (1, 5.0 + 3 * STEP_S)
    assert values_of(latencies.prompt_tokens.snapshot()) == (1, 3.0)
    assert values_of(latencies.output_tokens.snapshot()) == (1, 3.0)
    assert latencies.num_finished == {FinishReason.LENGTH: 1}


def test_a_start_comes_with_the_first_token_alone() -> None:
    run = Run(max_num_batched_tokens=8)
    run.add(1, list(range(1, 20)), max_tokens=3)
    run.now += 1.0
    starts = [run.step().starts for _ in range(5)]
    assert starts == [{}, {}, {1: Start(queue_s=1.0, prefill_s=3 * STEP_S)}, {}, {}]


def test_choices_of_a_request_are_one_request() -> None:
    run = Run()
    run.add(1, [1, 2, 3], num_forks=2, max_tokens=2)
    first, second = run.step(), run.step()
    assert first.starts == {1: Start(0.0, STEP_S)}
    assert second.starts == {2: Start(0.0, 2 * STEP_S), 3: Start(0.0, 2 * STEP_S)}
    run.drain()
    latencies = run.scheduler.latencies
    assert values_of(latencies.queue_s.snapshot()) == (1, 0.0)
    assert values_of(latencies.ttft_s.snapshot()) == (1, STEP_S)
    assert values_of(latencies.prompt_tokens.snapshot()) == (1, 3.0)
    assert values_of(latencies.e2e_s.snapshot()) == (1, 3 * STEP_S)
    assert values_of(latencies.output_tokens.snapshot()) == (3, 6.0)
    assert values_of(latencies.itl_s.snapshot()) == (3, 3 * STEP_S)


def test_a_preempted_sequence_counts_the_gap_that_its_reader_sees() -> None:
    run = Run(num_blocks=6, block_size=4)
    run.add(1, [1, 2, 3, 4], max_tokens=12)
    run.add(2, [5, 6, 7, 8], max_tokens=12)
    tokens_at: dict[int, list[float]] = {1: [], 2: []}
    while run.scheduler.has_work:
        for sequence in run.step().sequences:
            tokens_at[sequence.sequence_id].append(run.now)
    assert run.scheduler.running.num_preemptions > 0
    gaps = [later - sooner for times in tokens_at.values() for sooner, later in pairwise(times)]
    assert max(gaps) > STEP_S, "the test preempts nobody for longer than a step"
    itl_s = run.scheduler.latencies.itl_s.snapshot()
    assert values_of(itl_s) == (len(gaps), sum(gaps))
    assert values_of(run.scheduler.latencies.queue_s.snapshot())[0] == 2
    assert values_of(run.scheduler.latencies.ttft_s.snapshot())[0] == 2


def test_a_restart_is_a_gap_and_no_second_start() -> None:
    run = Run()
    run.add(1, [1, 2, 3], max_tokens=4)
    run.step()
    run.step()
    run.scheduler.restart()
    run._executor.restart()
    run.now += 30.0
    assert run.step().starts == {}
    run.drain()
    latencies = run.scheduler.latencies
    assert values_of(latencies.itl_s.snapshot()) == (3, 3 * STEP_S + 30.0)
    assert values_of(latencies.ttft_s.snapshot()) == (1, STEP_S)
    assert values_of(latencies.queue_s.snapshot()) == (1, 0.0)


def test_an_abort_is_no_end_that_its_client_waited_for() -> None:
    run = Run()
    run.add(1, [1, 2, 3], num_forks=1)
    run.scheduler.abort(2, run.now)  # while it is held, without a prompt
    run.step()
    run.scheduler.abort(1, run.now)
    run.scheduler.abort(1, run.now)
    latencies = run.scheduler.latencies
    assert latencies.num_finished == {FinishReason.ABORT: 2}
    assert values_of(latencies.e2e_s.snapshot()) == (0, 0.0)
    assert values_of(latencies.output_tokens.snapshot()) == (2, 1.0)


def test_a_choice_that_its_client_ends_counts_as_stopped() -> None:
    run = Run()
    run.add(1, [1, 2, 3])
    run.step()
    run.scheduler.abort(1, run.now, reason=FinishReason.STOP)
    latencies = run.scheduler.latencies
    assert latencies.num_finished == {FinishReason.STOP: 1}
    assert values_of(latencies.e2e_s.snapshot()) == (1, STEP_S)


def test_one_that_is_aborted_in_flight_gets_no_token() -> None:
    run = Run()
    run.add(1, [1, 2, 3])
    run.add(2, [4, 5, 6])
    run.step()
    output = run.scheduler.schedule(run.now)
    result = run._executor.execute(run._table.flatten(output))
    run.scheduler.abort(1, run.now)
    run.now += STEP_S
    run.scheduler.update(result, run.now)
    assert values_of(run.scheduler.latencies.itl_s.snapshot()) == (1, STEP_S)
