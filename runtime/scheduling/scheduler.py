"""Decides who runs in a step and how many tokens: continuous batching with chunked prefill.

Each sequence has some tokens computed and tries to catch up with the tokens it has; there is no
prefill phase and no decode phase. Pure: the same calls give the same decisions. A sequence that
has caught up is steady: it feeds one token a step, and nothing is done for it until something
happens to it, which is a block edge, its end, or a preemption.

Steps may be decided ahead of what earlier ones bring: a step counts as done when it is decided, and
the tokens that it samples are pending until it is acknowledged. What ends a sequence early leaves
rows of it in later steps, which bring nothing.
"""

from collections.abc import Collection, Mapping

from runtime.errors import CapacityError, DeadlineError, LockstepError, ModelOutputError
from runtime.request import FinishReason
from runtime.scheduling.admission import Admission
from runtime.scheduling.cache_manager import CacheManager
from runtime.scheduling.ending import EndTokens, end_by_length
from runtime.scheduling.in_flight import StepsInFlight
from runtime.scheduling.invariants import check_between_steps, check_live
from runtime.scheduling.latencies import Latencies
from runtime.scheduling.limits import SchedulerLimits
from runtime.scheduling.output import SchedulerOutput, StepOutcome
from runtime.scheduling.policy import Policy
from runtime.scheduling.quarantine import Quarantine
from runtime.scheduling.results import (
    check_result,
    error_of,
    find_faults,
    take_scores,
    take_tokens,
)
from runtime.scheduling.running import RunningSet
from runtime.scheduling.sequence import Sequence, Status
from runtime.scheduling.step_budget import StepBudget
from runtime.scheduling.step_plan import Fault, StepResult
from runtime.scheduling.waiting import Dropped, WaitingRoom

POISON = (
    "the workers ended twice while this request ran alone, without a cause outside: it isn't tried "
    "again"
)


class Scheduler:
    """`schedule()` decides a step, `update()` applies what the oldest in flight brought.

    The workers run steps in their order. `now` is seconds of any clock that doesn't go back.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        policy: Policy,
        limits: SchedulerLimits,
        eos_token_ids: Collection[int],
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.end_tokens = EndTokens(eos_token_ids)
        self.waiting = WaitingRoom(policy, limits.queue)
        self.running = RunningSet(cache, policy, self.waiting)
        self.admission = Admission(cache, policy, limits, self.waiting, self.running)
        self.latencies = Latencies()
        self.num_refused = 0
        self._sequences: dict[int, Sequence] = {}  # all that live
        self._max_sequence_tokens = cache.layout.max_sequence_tokens
        self._num_arrivals = 0
        self._in_flight = StepsInFlight()
        self._quarantine = Quarantine()
        self._dropped: list[Dropped] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running.sequences or len(self.waiting) or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Steps that were decided and not updated."""
        return len(self._in_flight)

    def add(self, sequence: Sequence, now: float = 0.0) -> None:
        """Queues a sequence and its forks, whose ids are new and which the pool can hold alone.

        Raises CapacityError: the queue is full for one that isn't resumed; it isn't queued.
        """
        assert sequence.num_tokens <= self._max_sequence_tokens, f"{sequence} is too long"
        family = [sequence, *sequence.forks]
        for each in family:
            assert each.sequence_id not in self._sequences, f"{each} is known already"
            each.arrival = self._num_arrivals
            each.arrival_s = now
            self._num_arrivals += 1
            length = each.num_prompt_tokens + each.params.max_tokens
            each.max_num_tokens = min(length, self.limits.max_model_len)
        try:
            self.waiting.add(sequence, num_free_slots=self.admission.num_free_slots(sequence))
        except CapacityError:
            self.num_refused += 1
            sequence.forks = ()  # a cycle, which nobody collects while requests wait
            raise
        self._sequences.update((each.sequence_id, each) for each in family)
        for each in family:
            self.end_tokens.add(each)

    def abort(
        self,
        sequence_id: int,
        now: float = 0.0,
        *,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """Ends a sequence in any state; ids that are unknown or ended already are ignored.

        Its forks go on without it.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        before = sequence.status
        sequence.finish(reason)
        self.latencies.end(sequence, now)
        if before is Status.HELD:
            assert sequence.fork_of is not None
            source = sequence.fork_of
            source.forks = tuple(each for each in source.forks if each is not sequence)
        self._stop(sequence)
        self._release_forks(sequence)

    def schedule(self, now: float = 0.0) -> SchedulerOutput | None:
        """Decides the next step; None if there is nothing to run before an update."""
        self.expire(now)
        step_id = self._in_flight.last_step_id + 1
        running = self.running
        suspect = self._quarantine.first
        if suspect is not None:
            running.send_back_all_but(suspect)
        num_preemptions = running.num_preemptions
        running.grow(step_id)
        # Who has just lost its blocks, or waits for some, would see them go in the same breath.
        admits = running.num_preemptions == num_preemptions and not running.stalled
        admits = admits and suspect is None
        step_s = self._in_flight.quickest_s
        if admits:
            self.admission.make_room_for_urgent(now=now, step_s=step_s)
        budget = StepBudget(self.limits, num_steady=len(running.steady.members))
        self._feed_behind(budget)
        if admits:
            self._admit(budget, now=now, step_s=step_s)
        if suspect is not None and not self._in_flight and suspect in self.waiting:
            self._start(self.admission.admit_alone(suspect, now), budget, now=now)
        self.waiting.settle()
        if not (budget.scheduled or running.steady.members):
            return None
        removed, added, changed, copies = running.take_changes()
        output = SchedulerOutput(
            step_id=step_id,
            steady=running.steady.members,
            scheduled=tuple(budget.scheduled),
            removed=tuple(removed),
            added=tuple(added),
            changed=tuple(changed),
            copies=tuple(copies),
            awaited_step_id=self._in_flight.awaited_step_id,
        )
        self._in_flight.add(output, now)
        running.advance(output)
        self.cache.dispatch(step_id)
        return output

    def update(self, result: StepResult, now: float = 0.0) -> StepOutcome:
        """Applies the result of the oldest step in flight.

        Raises WorkerError: it isn't that step's, or its tokens aren't those that were asked for.
        """
        output = self._in_flight.oldest
        caught_up = [each.sequence for each in output.scheduled if each.samples]
        steady_ids = self.running.steady.ids_of(output.steady)
        check_result(result, output, steady_ids + [each.sequence_id for each in caught_up])
        self._in_flight.take(now)
        sampled = [*output.steady, *caught_up]
        logprobs = {sampled[row].sequence_id: each for row, each in result.logprobs.items()}
        failed = self._end_faulty(find_faults(output, sampled, result))
        scores = take_scores(output, result)
        sequences, token_ids = sampled, result.token_ids
        if failed or self._in_flight.may_have_ended(output):
            pairs = zip(sampled, token_ids, strict=True)
            kept = [pair for pair in pairs if pair[0].finish_reason is None]
            sequences, token_ids = [each for each, _ in kept], [token for _, token in kept]
        take_tokens(sequences, token_ids)
        self._quarantine.note_tokens(sequences)
        self._commit(output)  # first: it takes in what is given back now
        self.cache.acknowledge(output.step_id)
        since = self.running.last_token_s
        starts = self.latencies.step(caught_up, num_tokens=len(sequences), since=since, now=now)
        ending = self.running.settle(output.step_id, now)
        finished = self.end_tokens.end(sequences, token_ids) + end_by_length(ending)
        for sequence in finished:
            self._stop(sequence)
            self.latencies.end(sequence, now)
        for sequence in caught_up:
            self._release_forks(sequence)
        return StepOutcome(sequences, token_ids, finished, failed, logprobs, scores, starts)

    def expire(self, now: float) -> None:
        """Drops those that wait too long. For when no step is decided for a while."""
        for sequence, error in self.waiting.expire(now):
            self._drop(sequence, error)

    def take_dropped(self) -> list[Dropped]:
        """Those that waited too long since the last call, or aren't run again after a restart.

        Each with what to tell its client.
        """
        dropped, self._dropped = self._dropped, []
        return dropped

    def restart(self, *, is_outside: bool = True) -> None:
        """Forgets the steps in flight and the whole cache: all running sequences wait again.

        For the start of an epoch, in which the workers hold nothing and count steps from 1. Keeps
        the order. Unless what ended the last one came from outside, what was in flight may have
        done it: after the second time it runs alone, and after two times alone not again.
        """
        waiting = [each for each in self.waiting if self.cache.is_in_flight(each)]
        for sequence in waiting:  # what they wait for changes below
            self.waiting.remove(sequence)
        lost = self._in_flight.clear()
        for output in lost:
            for each in output.scheduled:
                each.sequence.num_scored_tokens -= len(each.scored)
        for sequence in self._sequences.values():
            sequence.num_pending_tokens = 0
        for sequence in reversed(waiting):
            self.waiting.add_front(sequence)
        self.running.clear()
        for sequence in self._sequences.values():
            sequence.in_flight_until = 0
        for poison in () if is_outside else self._quarantine.note_end(lost):
            self.waiting.remove(poison)
            self._drop(poison, ModelOutputError(POISON))

    def check_invariants(self) -> None:
        """Asserts what must hold between two calls."""
        self.cache.check_invariants()
        self.waiting.check_invariants()
        self.running.check_invariants()
        check_live(self._sequences, self.waiting, self.running)
        self._quarantine.check_invariants(self._sequences.keys())
        assert len(self.running) <= self.limits.max_num_seqs
        if not self._in_flight:
            check_between_steps(self.running, self.cache.pool, self.limits)

    def _feed_behind(self, budget: StepBudget) -> None:
        """The running sequences that are behind come first, the oldest of them before others."""
        for sequence in self.running.behind:
            # One that stalled may wait for a token still.
            if not sequence.num_pending_tokens and sequence.sequence_id not in self.running.stalled:
                budget.feed(sequence)

    def _admit(self, budget: StepBudget, *, now: float, step_s: float) -> None:
        limits = self.limits
        while budget.num_tokens and len(self.waiting) and len(self.running) < limits.max_num_seqs:
            sequence = self.admission.admit_next(budget, now=now, step_s=step_s)
            if sequence is None:
                break
            self._start(sequence, budget, now=now)
        for late in self.admission.take_late():
            message = "the call's deadline passes before the next token can be there"
            self._drop(late, DeadlineError(message))

    def _start(self, sequence: Sequence, budget: StepBudget, *, now: float) -> None:
        """One that was admitted runs."""
        self.latencies.admit(sequence, now)
        budget.feed(sequence)

    def _end_faulty(self, faults: Mapping[Sequence, Fault]) -> list[Dropped]:
        """Ends sequences that the step couldn't go on with; returns what to tell their clients."""
        for sequence in faults:
            sequence.finish(FinishReason.ABORT)
            self._stop(sequence)
            self._release_forks(sequence)
        return [(sequence, error_of(fault)) for sequence, fault in faults.items()]

    def _commit(self, output: SchedulerOutput) -> None:
        """Others may share what a step has computed of prompts that are still held.

        Who was preempted since doesn't run again before its last step is acknowledged.
        """
        for sequence, computed, count, _, _ in output.scheduled:
            if sequence.status in (Status.RUNNING, Status.ENDING):
                self.cache.commit(sequence, computed + count)

    def _stop(self, sequence: Sequence) -> None:
        """A sequence has ended, wherever it was."""
        self._forget(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self.running.stop(sequence, in_flight_until=self._in_flight.last_step_id)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.sequence_id]
        self._quarantine.note_tokens([sequence])
        self.end_tokens.remove(sequence)
        self._in_flight.note_end()

    def _drop(self, sequence: Sequence, error: LockstepError) -> None:
        """A sequence that has left the queue ends, and with it the forks that wait for it."""
        self._dropped.append((sequence, error))
        for each in (sequence, *sequence.forks):
            self._forget(each)
            each.finish(FinishReason.ABORT)
        sequence.forks = ()

    def _release_forks(self, sequence: Sequence) -> None:
        """The prompt is there, or never will be: those that share it stop waiting for it."""
        forks, sequence.forks = sequence.forks, ()
        for fork in reversed(forks):
            fork.release(self.cache.layout.block_size)
            self.waiting.add_front(fork)
