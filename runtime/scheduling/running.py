"""The sequences that hold blocks, and what has changed about them since the last step."""

from runtime.scheduling.cache_manager import Admitted, CacheManager
from runtime.scheduling.output import BlockCopy, SchedulerOutput, TableChange
from runtime.scheduling.policy import Policy
from runtime.scheduling.sequence import Sequence, Status
from runtime.scheduling.steady import SteadySet
from runtime.scheduling.waiting import WaitingRoom


class RunningSet:
    """Running sequences: steady ones, and those that are behind with their tokens.

    Beside them those that are ending: they run no more, and get their last token from a step in
    flight.
    """

    def __init__(self, cache: CacheManager, policy: Policy, waiting: WaitingRoom) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.steady = SteadySet()
        self.behind: list[Sequence] = []  # in order of admission
        self.ending: dict[int, Sequence] = {}
        self.stalled: set[int] = set()  # ids of those behind that wait for blocks in this step
        self.num_preemptions = 0
        self.last_token_s = 0.0  # when the steady ones got their last token
        self._cache = cache
        self._policy = policy
        self._waiting = waiting
        self._claims = 0  # blocks that all of these hold at most, once they end
        self._ending_at: dict[int, list[Sequence]] = {}  # by the step that samples the last token
        self._unsettled: list[Sequence] = []  # left the steady ones with tokens in flight
        self._removed: list[int] = []
        self._added: list[Sequence] = []
        self._changed: list[TableChange] = []
        self._copies: list[BlockCopy] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether it holds blocks."""
        return sequence.sequence_id in self.sequences or sequence.sequence_id in self.ending

    @property
    def num_holding(self) -> int:
        """Sequences whose blocks aren't free: also those that only steps in flight still have."""
        return len(self.sequences) + len(self.ending) + self._cache.num_leaving

    @property
    def num_unsettled(self) -> int:
        """Sequences that aren't steady any more, and get tokens of steps in which they were."""
        return len(self._unsettled)

    @property
    def growth(self) -> int:
        """Blocks that they may still come to hold."""
        return self._claims - self._cache.num_table_blocks

    def most_blocks(self, sequence: Sequence) -> int:
        """Blocks that a sequence holds at most; its last token is never fed."""
        return self._cache.layout.max_blocks_for(sequence.max_num_tokens - 1)

    def start(self, sequence: Sequence, admitted: Admitted) -> None:
        """A sequence has got its blocks."""
        sequence.status = Status.RUNNING
        self._policy.charge(sequence)
        self.sequences[sequence.sequence_id] = sequence
        self.behind.append(sequence)
        self._claims += self.most_blocks(sequence)
        self._added.append(sequence)
        self._changed.append(admitted.change)
        self._copies.extend(admitted.copies)

    def grow(self, step_id: int) -> None:
        """Makes room for what they feed in this step, preempting where it is missing.

        Who lacks blocks that steps in flight will free is stalled: it sits out this step.
        """
        self.stalled.clear()
        size = self._cache.layout.block_size
        for sequence in self.steady.take_growing(step_id):
            if self._make_room(sequence):
                self.steady.grow_at(sequence, step_id + size)
        for sequence in self.behind.copy():
            self._make_room(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks for others; it waits again, to be computed again."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._send_back(sequence)

    def send_back_all_but(self, sequence: Sequence) -> None:
        """The others wait until this one has run alone."""
        others = [each for each in self.sequences.values() if each is not sequence]
        for each in sorted(others, key=self._policy.rank, reverse=True):
            self._send_back(each)

    def stop(self, sequence: Sequence, *, in_flight_until: int) -> None:
        """A sequence that runs or is ending, whose status says so, does no more.

        Its blocks are given back once the step `in_flight_until`, the last that may have it, is
        acknowledged.
        """
        if self.ending.pop(sequence.sequence_id, None) is None:
            self._take_out(sequence)
            sequence.in_flight_until = in_flight_until
        self._claims -= self.most_blocks(sequence)
        self._policy.settle(sequence)
        self._cache.free(sequence)

    def advance(self, output: SchedulerOutput) -> None:
        """A step is decided: what it feeds counts as computed, what it samples is pending.

        Those that have caught up are steady from the next step on, or ending.
        """
        step_id = output.step_id
        for sequence in output.steady:
            sequence.num_computed_tokens += 1
            sequence.num_pending_tokens += 1
        ending = self.steady.take_ending(step_id)
        joining = []
        for sequence, _, count, samples, scored in output.scheduled:
            sequence.num_computed_tokens += count
            sequence.num_scored_tokens += len(scored)
            if not samples:
                continue
            sequence.num_pending_tokens += 1
            if sequence.num_planned_tokens < sequence.max_num_tokens:
                joining.append(sequence)
            else:
                ending.append(sequence)
        for sequence in joining:
            self.behind.remove(sequence)
            capacity = self._cache.capacity(sequence)
            self.steady.join(sequence, step_id=step_id + 1, capacity=capacity)
        self.steady.add(joining)
        for sequence in ending:
            self._take_out(sequence)
            sequence.status = Status.ENDING
            sequence.in_flight_until = step_id
            self.ending[sequence.sequence_id] = sequence
        if ending:
            self._ending_at[step_id] = ending

    def settle(self, step_id: int, now: float) -> list[Sequence]:
        """The sequences of a step have got its tokens; returns who has been ending with it.

        Some of those may have ended before.
        """
        self.last_token_s = now
        if self._unsettled:
            for sequence in self._unsettled:
                sequence.last_token_s = now
            self._unsettled = [
                each
                for each in self._unsettled
                if each.num_pending_tokens and each.finish_reason is None
            ]
        return self._ending_at.pop(step_id, [])

    def take_changes(
        self,
    ) -> tuple[list[int], list[Sequence], list[TableChange], list[BlockCopy]]:
        """What happened since the last call: removed, added, changed, copies."""
        changes = self._removed, self._added, self._changed, self._copies
        self._removed, self._added, self._changed, self._copies = [], [], [], []
        return changes

    def clear(self) -> None:
        """The workers have lost the cache and all steps: all wait again, in their order."""
        every = [*self.sequences.values(), *self.ending.values()]
        for sequence in sorted(every, key=self._policy.rank, reverse=True):
            self._send_back(sequence)
        self._ending_at.clear()
        self._unsettled.clear()
        self._cache.clear()

    def check_invariants(self) -> None:
        self.steady.check_invariants()
        assert all(each.status is Status.RUNNING for each in self.sequences.values())
        assert all(each.status is Status.ENDING for each in self.ending.values())
        holders = [*self.sequences.values(), *self.ending.values()]
        assert self._claims == sum(map(self.most_blocks, holders))
        for each in self.steady.members:
            missing = each.num_planned_tokens - each.num_computed_tokens
            assert missing == 1, f"{each} isn't steady"
        both = [*self.steady.members, *self.behind]
        assert {each.sequence_id for each in both} == self.sequences.keys()
        assert len(both) == len(self.sequences)

    def _send_back(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self.stop(sequence, in_flight_until=self._cache.last_step_id)
        sequence.num_computed_tokens = 0
        self._waiting.add_front(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        """A sequence is in no step from now on."""
        del self.sequences[sequence.sequence_id]
        if sequence in self.behind:
            self.behind.remove(sequence)
        else:
            self._leave_steady(sequence)
        self._removed.append(sequence.sequence_id)
        if self._changed:
            self._changed = [
                each for each in self._changed if each.sequence_id != sequence.sequence_id
            ]

    def _leave_steady(self, sequence: Sequence) -> None:
        self.steady.leave(sequence)
        sequence.last_token_s = self.last_token_s
        if sequence.num_pending_tokens and sequence.finish_reason is None:
            self._unsettled.append(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempts the worst by policy until `sequence` fits.

        False if it isn't in this step: it was preempted itself, or stalls.
        """
        while sequence.status is Status.RUNNING:
            change = self._cache.extend(sequence)
            if change is not None:
                self._changed.append(change)
                return True
            if self._cache.num_missing(sequence) <= self._cache.num_coming(self.ending.values()):
                self._stall(sequence)
                return False
            self.preempt(max(self.sequences.values(), key=self._policy.rank))
        return False

    def _stall(self, sequence: Sequence) -> None:
        """The blocks that it lacks are on their way back: nobody is preempted for them."""
        if sequence not in self.behind:
            self._leave_steady(sequence)
            self.behind.insert(0, sequence)
        self.stalled.add(sequence.sequence_id)
