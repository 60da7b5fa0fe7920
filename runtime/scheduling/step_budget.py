"""What a step feeds to sequences that are behind, and what it may still feed."""

from runtime.scheduling.limits import SchedulerLimits
from runtime.scheduling.output import ScheduledSequence
from runtime.scheduling.sequence import Sequence


class StepBudget:
    """Tokens left for a step's sequences; of those whose prompts are scored there are fewer."""

    def __init__(self, limits: SchedulerLimits, *, num_steady: int) -> None:
        self.num_tokens = limits.max_num_batched_tokens - num_steady
        self.scheduled: list[ScheduledSequence] = []  # what they were spent on
        self.partial: list[Sequence] = []  # those of these that need more than they get
        self._num_scored_tokens = limits.max_num_scored_tokens
        self._max_chunk_tokens = limits.max_chunk_tokens

    def room(self, sequence: Sequence) -> int:
        """Most tokens that it could be fed."""
        room = min(self.num_tokens, self._max_chunk_tokens)
        return min(room, self._num_scored_tokens) if sequence.awaits_scores else room

    def take(self, sequence: Sequence) -> int:
        """How many tokens it is fed, all known; 0 where there are none left for it."""
        count = min(sequence.num_tokens - sequence.num_computed_tokens, self.room(sequence))
        self.num_tokens -= count
        if sequence.awaits_scores:
            self._num_scored_tokens -= count
        return count

    def feed(self, sequence: Sequence) -> None:
        """Schedules as much of a sequence as there is room for, if there is any."""
        count = self.take(sequence)
        if not count:
            return
        scheduled = ScheduledSequence.of(sequence, count)
        self.scheduled.append(scheduled)
        if not scheduled.samples:
            self.partial.append(sequence)
