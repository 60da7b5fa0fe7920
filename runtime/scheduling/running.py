"""The sequences that hold blocks, and what has changed about them since the last step."""

from collections.abc import Iterable

from runtime.scheduling.cache_manager import Admitted, CacheManager
from runtime.scheduling.output import BlockCopy, TableChange
from runtime.scheduling.policy import Policy
from runtime.scheduling.sequence import Sequence, Status
from runtime.scheduling.steady import SteadySet
from runtime.scheduling.waiting import WaitingRoom


class RunningSet:
    """Running sequences: steady ones, and those that are behind with their tokens."""

    def __init__(self, cache: CacheManager, policy: Policy, waiting: WaitingRoom) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.steady = SteadySet()
        self.behind: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self.last_token_s = 0.0  # when the steady ones got their last token
        self._cache = cache
        self._policy = policy
        self._waiting = waiting
        self._claims = 0  # blocks that they hold at most, once they end
        self._removed: list[int] = []
        self._added: list[Sequence] = []
        self._changed: list[TableChange] = []
        self._copies: list[BlockCopy] = []

    def __len__(self) -> int:
        return len(self.sequences)

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
        """Makes room for what they feed in this step, preempting where it is missing."""
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

    def stop(self, sequence: Sequence) -> None:
        """A sequence, whose status says so, runs no more. It keeps its blocks until `free`."""
        del self.sequences[sequence.sequence_id]
        self._claims -= self.most_blocks(sequence)
        self._policy.settle(sequence)
        if sequence in self.behind:
            self.behind.remove(sequence)
        else:
            self.steady.leave(sequence)

    def free(self, sequence: Sequence) -> None:
        """Gives back the blocks of a sequence that was stopped."""
        self._cache.free(sequence)
        self._removed.append(sequence.sequence_id)
        if self._changed:
            self._changed = [
                each for each in self._changed if each.sequence_id != sequence.sequence_id
            ]

    def settle(self, caught_up: Iterable[Sequence], next_step_id: int, now: float) -> None:
        """Of those that have caught up, the ones that still run are steady from now on.

        They and the other steady ones have just got a token.
        """
        self.last_token_s = now
        joining = [each for each in caught_up if each.status is Status.RUNNING]
        for sequence in joining:
            capacity = self._cache.capacity(sequence)
            self.steady.join(sequence, step_id=next_step_id, capacity=capacity)
        if joining:
            ids = {each.sequence_id for each in joining}
            self.behind = [each for each in self.behind if each.sequence_id not in ids]
        self.steady.add(joining)

    def take_changes(
        self,
    ) -> tuple[list[int], list[Sequence], list[TableChange], list[BlockCopy]]:
        """What happened since the last call: removed, added, changed, copies."""
        changes = self._removed, self._added, self._changed, self._copies
        self._removed, self._added, self._changed, self._copies = [], [], [], []
        return changes

    def clear(self) -> None:
        """The workers have lost the cache: all wait again, in their order."""
        for sequence in sorted(self.sequences.values(), key=self._policy.rank, reverse=True):
            self._send_back(sequence)
        self._cache.clear()

    def check_invariants(self) -> None:
        self.steady.check_invariants()
        assert all(each.status is Status.RUNNING for each in self.sequences.values())
        assert self._claims == sum(map(self.most_blocks, self.sequences.values()))
        both = [*self.steady.members, *self.behind]
        assert {each.sequence_id for each in both} == self.sequences.keys()
        assert len(both) == len(self.sequences)

    def _send_back(self, sequence: Sequence) -> None:
        if sequence not in self.behind:
            sequence.last_token_s = self.last_token_s
        sequence.status = Status.WAITING
        self.stop(sequence)
        self.free(sequence)
        sequence.num_computed_tokens = 0
        self._waiting.add_front(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempts the worst by policy until `sequence` fits; False if it doesn't run any more."""
        while sequence.status is Status.RUNNING:
            change = self._cache.extend(sequence)
            if change is not None:
                self._changed.append(change)
                return True
            self.preempt(max(self.sequences.values(), key=self._policy.rank))
        return False
