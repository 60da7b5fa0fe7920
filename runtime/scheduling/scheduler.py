"""Decides who runs in a step and how many tokens: continuous batching with chunked prefill.

Each sequence has some tokens computed and tries to catch up with the tokens it has; there is no
prefill phase and no decode phase. Pure: the same calls give the same decisions.
"""

from collections import deque
from collections.abc import Collection

from runtime.errors import WorkerError
from runtime.request import FinishReason
from runtime.scheduling.cache_manager import CacheManager
from runtime.scheduling.output import (
    BlocksAppended,
    ScheduledSequence,
    SchedulerOutput,
    SequenceUpdate,
)
from runtime.scheduling.sequence import Sequence, Status
from runtime.scheduling.step_plan import StepResult


class Scheduler:
    """First come, first served; the youngest is preempted first.

    `schedule()` decides a step, `update()` applies what it brought; one step is in flight at most.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        watermark: float,
        max_model_len: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.watermark_blocks = int(watermark * cache.pool.num_blocks)
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.num_preemptions = 0
        self.waiting: deque[Sequence] = deque()
        # In order of admission. All but the last have caught up with their tokens: the one that
        # hasn't takes what is left of the budget, and then nobody is admitted behind it.
        self.running: list[Sequence] = []
        self._sequences: dict[int, Sequence] = {}
        self._last_step_id = 0
        self._in_flight: SchedulerOutput | None = None
        # Aborted while a step that may write their blocks is in flight.
        self._freed_on_update: list[int] = []
        self._removed: list[int] = []
        self._added: list[Sequence] = []
        self._appended: list[BlocksAppended] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, whose id is new and which the pool can hold alone."""
        assert sequence.sequence_id not in self._sequences, f"{sequence} is known already"
        assert sequence.num_tokens <= self.cache.layout.max_sequence_tokens, f"{sequence} too long"
        self._sequences[sequence.sequence_id] = sequence
        self.waiting.append(sequence)

    def abort(self, sequence_id: int) -> None:
        """Ends a sequence in any state; ids that are unknown or ended already are ignored."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            if self._in_flight is None:
                self._free(sequence.sequence_id)
            else:
                self._freed_on_update.append(sequence_id)
        sequence.finish(FinishReason.ABORT)

    def schedule(self) -> SchedulerOutput | None:
        """Decides the next step; None if there is nothing to run."""
        assert self._in_flight is None, "a step is in flight"
        scheduled: list[ScheduledSequence] = []
        num_preemptions = self.num_preemptions
        budget = self._schedule_running(scheduled)
        if self.num_preemptions == num_preemptions:
            self._admit(scheduled, budget)
        if not scheduled:
            return None
        self._last_step_id += 1
        self._in_flight = SchedulerOutput(
            step_id=self._last_step_id,
            scheduled=tuple(scheduled),
            removed=tuple(self._removed),
            added=tuple(self._added),
            appended=tuple(self._appended),
        )
        self._removed, self._added, self._appended = [], [], []
        return self._in_flight

    def update(self, result: StepResult) -> list[SequenceUpdate]:
        """Applies the result of the step in flight.

        Raises WorkerError: it isn't that step's, or its tokens aren't those that were asked for.
        """
        output, self._in_flight = self._in_flight, None
        assert output is not None, "no step is in flight"
        if result.step_id != output.step_id:
            raise WorkerError(f"result of step {result.step_id} for step {output.step_id}")
        wanted = {each.sequence.sequence_id for each in output.scheduled if each.samples}
        if result.token_ids.keys() != wanted:
            raise WorkerError(
                f"step {output.step_id}: tokens for sequences {sorted(result.token_ids)}, "
                f"wanted for {sorted(wanted)}"
            )
        for sequence_id in self._freed_on_update:
            self._free(sequence_id)
        self._freed_on_update = []
        updates = [
            self._advance(each, result.token_ids.get(each.sequence.sequence_id, ()))
            for each in output.scheduled
            if each.sequence.status is Status.RUNNING
        ]
        if any(update.finish_reason is not None for update in updates):
            self.running = [each for each in self.running if each.status is Status.RUNNING]
        return updates

    def restart(self) -> None:
        """Forgets the step in flight and the whole cache: all running sequences wait again.

        For the start of an epoch, in which the workers hold nothing. Keeps the order.
        """
        self._in_flight = None
        for sequence_id in self._freed_on_update:
            self._free(sequence_id)
        self._freed_on_update = []
        while self.running:
            self._preempt(self.running[-1])

    def check_invariants(self) -> None:
        """Asserts what must hold between two calls."""
        self.cache.check_invariants()
        live = [*self.running, *self.waiting]
        assert {each.sequence_id for each in live} == self._sequences.keys()
        assert len(live) == len(self._sequences)
        assert all(each.status is Status.RUNNING for each in self.running)
        assert all(each.status is Status.WAITING for each in self.waiting)
        assert all(each.num_computed_tokens == 0 for each in self.waiting)
        assert len(self.running) <= self.max_num_seqs
        if self._in_flight is not None:
            return
        for each in self.running[:-1]:
            assert each.num_tokens - each.num_computed_tokens == 1, f"{each} isn't the last"
        if not live:
            assert self.cache.pool.num_free == self.cache.pool.num_blocks, "blocks are lost"

    def _schedule_running(self, scheduled: list[ScheduledSequence]) -> int:
        budget = self.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            if not self._make_room(sequence):
                break
            budget -= self._take(sequence, budget, scheduled)
            index += 1
        return budget

    def _admit(self, scheduled: list[ScheduledSequence], budget: int) -> None:
        pool = self.cache.pool
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            # A sequence that is alone may fill the pool.
            spare = self.watermark_blocks if self.running else 0
            if self.cache.blocks_for(sequence.num_tokens) + spare > pool.num_free:
                break
            self.waiting.popleft()
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            self._added.append(sequence)
            roomy = self._make_room(sequence)
            assert roomy, f"{sequence} was admitted and doesn't fit"
            budget -= self._take(sequence, budget, scheduled)

    def _take(self, sequence: Sequence, budget: int, scheduled: list[ScheduledSequence]) -> int:
        computed = sequence.num_computed_tokens
        count = min(sequence.num_tokens - computed, budget)
        scheduled.append(ScheduledSequence(sequence, computed, count))
        return count

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempts the youngest until `sequence` fits; False if that was itself."""
        while True:
            blocks = self.cache.grow(sequence.sequence_id, sequence.num_tokens)
            if blocks is not None:
                if blocks[0]:
                    self._appended.append(BlocksAppended(sequence.sequence_id, blocks))
                return True
            youngest = self.running[-1]
            self._preempt(youngest)
            self.num_preemptions += 1
            if youngest is sequence:
                return False

    def _preempt(self, sequence: Sequence) -> None:
        assert self.running[-1] is sequence
        self.running.pop()
        self._free(sequence.sequence_id)
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0
        self.waiting.appendleft(sequence)

    def _advance(self, each: ScheduledSequence, tokens: tuple[int, ...]) -> SequenceUpdate:
        sequence = each.sequence
        sequence.num_computed_tokens += each.num_scheduled_tokens
        for count, token in enumerate(tokens, start=1):
            sequence.token_ids.append(token)
            reason = self._finish_reason(sequence, token)
            if reason is not None:
                sequence.finish(reason)
                del self._sequences[sequence.sequence_id]
                self._free(sequence.sequence_id)
                return SequenceUpdate(sequence, tokens[:count], reason)
        return SequenceUpdate(sequence, tokens, None)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        if token in self.eos_token_ids and not sequence.params.ignore_eos:
            return FinishReason.STOP
        if sequence.num_output_tokens >= sequence.params.max_tokens:
            return FinishReason.LENGTH
        if sequence.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _free(self, sequence_id: int) -> None:
        self.cache.free(sequence_id)
        self._removed.append(sequence_id)
