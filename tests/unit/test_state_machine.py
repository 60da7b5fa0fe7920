"""Random lives of random requests: invariants at every step, the oracle's tokens at the end."""

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runtime.request import FinishReason
from runtime.scheduling.flatten import BatchTable
from tests.scheduling import OracleExecutor, make_scheduler, make_sequence, oracle_continuation

if TYPE_CHECKING:
    from runtime.scheduling.sequence import Sequence

pytestmark = pytest.mark.unit


class SchedulerMachine(RuleBasedStateMachine):
    """add / schedule / update / abort / crash in any order, on pools that are too small."""

    @initialize(
        num_blocks=st.integers(6, 24),
        num_groups=st.integers(1, 3),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 12),
        watermark=st.sampled_from([0.0, 0.1, 0.5]),
    )
    def start(
        self,
        num_blocks: int,
        num_groups: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        watermark: float,
    ) -> None:
        self.scheduler = make_scheduler(
            num_blocks=num_blocks * num_groups,
            num_groups=num_groups,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            watermark=watermark,
        )
        self.executor = OracleExecutor(self.scheduler.cache.layout)
        self.table = BatchTable(max_num_seqs=max_num_seqs, num_groups=num_groups)
        self.in_flight = None
        self.sequences: dict[int, Sequence] = {}
        self.aborted: set[int] = set()

    @rule(data=st.data(), max_tokens=st.integers(1, 8), seed=st.integers(0, 3))
    def add(self, data: st.DataObject, max_tokens: int, seed: int) -> None:
        room = self.scheduler.max_model_len - max_tokens
        if room < 1:
            return
        prompt = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=room))
        sequence_id = len(self.sequences)
        sequence = make_sequence(sequence_id, prompt, max_tokens=max_tokens, seed=seed)
        self.sequences[sequence_id] = sequence
        self.scheduler.add(sequence)

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def schedule(self) -> None:
        had_work = self.scheduler.has_work
        self.in_flight = self.scheduler.schedule()
        assert (self.in_flight is not None) == had_work, "work is queued and nothing runs"
        if self.in_flight is not None:
            budget = self.scheduler.max_num_batched_tokens
            assert 0 < self.in_flight.num_scheduled_tokens <= budget
            self.plan = self.table.flatten(self.in_flight)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def update(self) -> None:
        updates = self.scheduler.update(self.executor.execute(self.plan))
        assert not self.aborted & {update.sequence.sequence_id for update in updates}
        self.in_flight = None

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.sequences)))
        if self.sequences[sequence_id].finish_reason is None:
            self.aborted.add(sequence_id)
        self.scheduler.abort(sequence_id)

    @rule()
    def crash(self) -> None:
        self.scheduler.restart()
        self.executor.restart()
        self.in_flight = None

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.in_flight is not None:
            self.update()
        for _ in range(10_000):
            self.schedule()
            if self.in_flight is None:
                break
            self.update()
            self.scheduler.check_invariants()
        assert not self.scheduler.has_work, "no progress"
        for sequence_id, sequence in self.sequences.items():
            output = sequence.token_ids[sequence.num_prompt_tokens :]
            wanted = oracle_continuation(
                sequence.token_ids[: sequence.num_prompt_tokens],
                max_tokens=sequence.params.max_tokens,
                seed=sequence.seed,
            )
            if sequence_id in self.aborted:
                assert sequence.finish_reason is FinishReason.ABORT
                wanted = wanted[: len(output)]
            assert output == wanted


def test_state_machine() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(max_examples=400, stateful_step_count=25, deadline=None),
    )
