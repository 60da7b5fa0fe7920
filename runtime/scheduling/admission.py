"""Who of the waiting sequences may run: order, room, slots, deadlines."""

from collections.abc import Collection

from runtime.scheduling.cache_manager import CacheManager
from runtime.scheduling.held_blocks import CachedPrefix
from runtime.scheduling.limits import SchedulerLimits
from runtime.scheduling.policy import Policy
from runtime.scheduling.running import RunningSet
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_budget import StepBudget
from runtime.scheduling.waiting import MAX_SCORED, WaitingRoom

# Waiting sequences that are tried in a step where those before them don't fit.
LOOKAHEAD = 4
# A waiting sequence that so many have overtaken is waited for.
MAX_OVERTAKEN = 16
# Times as many spare blocks for each time that a sequence was preempted.
BACKOFF = 4
MAX_BACKOFF = 16


class Admission:
    """Moves sequences from the waiting to the running ones."""

    def __init__(
        self,
        cache: CacheManager,
        policy: Policy,
        limits: SchedulerLimits,
        waiting: WaitingRoom,
        running: RunningSet,
    ) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._late: list[Sequence] = []
        self._cache = cache
        self._policy = policy
        self._limits = limits
        self._waiting = waiting
        self._running = running
        self._watermark_blocks = int(limits.watermark * cache.pool.num_blocks)

    def num_free_slots(self, newcomer: Sequence) -> int:
        """Slots that newcomers find, if there are blocks for all of them with this one."""
        tokens = self._waiting.num_newcomer_tokens + newcomer.num_tokens
        if self._cache.layout.max_blocks_for(tokens) > self._cache.pool.num_free:
            return 0
        return self._limits.max_num_seqs - len(self._running)

    def make_room_for_urgent(self, *, now: float, step_s: float) -> None:
        """Preempts what yields to the head of the queue, if that lets it in and in time."""
        if not self._policy.preempts_for_admission:
            return
        for head in self._waiting.first(1):
            if self._cache.is_in_flight(head):
                return
            running, behind = self._running.sequences.values(), self._running.behind
            victims = [each for each in running if self._policy.yields(each, head)]
            if not victims:
                return
            prefix = self._cache.find_prefix(head)
            if self._is_late(head, prefix, now, step_s) or not self._lacks(head, prefix):
                return
            if self._lacks(head, prefix, without=victims):
                return
            # Last, and so first to go: those that take the token budget, then the worst.
            victims.sort(key=lambda each: (each in behind, self._policy.rank(each)))
            while victims and self._lacks(head, prefix):
                self._running.preempt(victims.pop())

    def admit_next(self, budget: StepBudget, *, now: float, step_s: float) -> Sequence | None:
        """Admits the first of those in front that fits; None if none does.

        `step_s` is what a step takes at least. So a sequence that doesn't fit holds up nobody, and
        isn't overtaken for ever. Prompts that are to be scored take turns in a lane of their own:
        while that is full they are passed over, and wait for nothing else.
        """
        num_scored = sum(each.awaits_scores for each in budget.partial)
        may_be_partial = len(budget.partial) - num_scored < self._limits.max_num_partial_prefills
        overtaken: list[Sequence] = []
        for sequence in self._front(budget):
            if self._cache.is_in_flight(sequence):
                return None  # preempted a moment ago; its tokens aren't all known
            if sequence.refused_at != self._cache.version:
                prefix = self._cache.find_prefix(sequence)
                if self._is_late(sequence, prefix, now, step_s):
                    self._waiting.remove(sequence)
                    self._late.append(sequence)
                    continue
                is_whole = sequence.num_tokens - prefix.num_tokens <= budget.room(sequence)
                fits = is_whole or (not num_scored if sequence.awaits_scores else may_be_partial)
                if fits and self._start(sequence, prefix, now):
                    for each in overtaken:
                        each.num_overtaken += 1
                    return sequence
            if sequence.num_overtaken >= MAX_OVERTAKEN:
                return None
            overtaken.append(sequence)
        return None

    def admit_alone(self, sequence: Sequence, now: float) -> Sequence:
        """Admits one that waits, while nothing runs and nothing is in flight: it has room."""
        is_admitted = self._start(sequence, self._cache.find_prefix(sequence), now)
        assert is_admitted, f"{sequence} doesn't fit though nothing runs"
        return sequence

    def _front(self, budget: StepBudget) -> list[Sequence]:
        """Those that are tried: the first for whom the budget has tokens."""
        if not self._waiting.has_scored:  # for all others it has
            return self._waiting.first(LOOKAHEAD)
        front = self._waiting.first(LOOKAHEAD + MAX_SCORED)
        return [each for each in front if budget.room(each)][:LOOKAHEAD]

    def take_late(self) -> list[Sequence]:
        """Those that were taken from the queue since even their first token would be late."""
        late, self._late = self._late, []
        return late

    def _is_late(self, sequence: Sequence, prefix: CachedPrefix, now: float, step_s: float) -> bool:
        """Whether even the first token would come after the deadline.

        With nobody running no: `step_s` may be of long ago, and stays so while all are dropped.
        """
        if sequence.deadline_s is None or not self._running.sequences:
            return False
        missing = sequence.num_tokens - prefix.num_tokens
        return (
            now + -(-missing // self._limits.chunk_tokens(sequence)) * step_s > sequence.deadline_s
        )

    def _start(self, sequence: Sequence, prefix: CachedPrefix, now: float) -> bool:
        """Admits a sequence; False if its blocks aren't free."""
        admitted = self._cache.admit(sequence, prefix, spare=self._spare(sequence, prefix))
        if admitted is None:
            sequence.refused_at = self._cache.version
            return False
        sequence.num_overtaken = 0
        is_newcomer = self._waiting.admit(sequence, now)
        self._running.start(sequence, admitted)
        if is_newcomer and sequence.first_choice is sequence:
            # Of one that is resumed, output may be there too.
            sequence.num_cached_tokens = min(prefix.num_tokens, sequence.num_prompt_tokens)
            self.num_cached_tokens += sequence.num_cached_tokens
            self.num_prompt_tokens += sequence.num_prompt_tokens
        return True

    def _spare(self, sequence: Sequence, prefix: CachedPrefix) -> int:
        """Blocks that stay free when a sequence is admitted, for the running ones to grow into.

        Enough for as long as its prompt takes, so that it isn't preempted half way; more each time
        that it was preempted, and all at once for one that takes most of the pool, which is so
        preempted once at most; never more than they, and it, can come to hold.
        """
        layout = self._cache.layout
        growing = len(self._running) * len(layout.groups)  # blocks, where all cross an edge
        missing = sequence.num_tokens - prefix.num_tokens
        steps = missing // self._limits.chunk_tokens(sequence)
        spare = max(self._watermark_blocks, steps * growing // layout.block_size)
        if sequence.num_preemptions:
            backoff = min(sequence.num_preemptions, MAX_BACKOFF)
            spare = max(spare, (self._watermark_blocks + growing) * BACKOFF**backoff)
        num_blocks = layout.max_blocks_for(sequence.num_tokens)
        if sequence.num_preemptions and 2 * num_blocks > layout.num_blocks:
            spare = layout.num_blocks
        own = self._running.most_blocks(sequence) - num_blocks
        return min(spare, self._running.growth + own)

    def _lacks(
        self, sequence: Sequence, prefix: CachedPrefix, *, without: Collection[Sequence] = ()
    ) -> bool:
        """Whether slot, tokens or blocks are missing for one more, were some running ones away."""
        if len(self._running) - len(without) >= self._limits.max_num_seqs:
            return True
        if self._lacks_tokens(sequence, prefix, without=without):
            return True
        spare = self._spare(sequence, prefix) if len(self._running) > len(without) else 0
        without = [*without, *self._running.ending.values()]
        # What is on its way back needn't be taken from anybody.
        return self._cache.num_free_after(sequence, prefix, without=without, soon=True) < spare

    def _lacks_tokens(
        self, sequence: Sequence, prefix: CachedPrefix, *, without: Collection[Sequence]
    ) -> bool:
        """Whether a sequence would be fed nothing in this step."""
        behind = [each for each in self._running.behind if each not in without]
        if sequence.awaits_scores and any(each.awaits_scores for each in behind):
            return True
        limits = self._limits
        wanted = [
            (each.num_planned_tokens - each.num_computed_tokens, limits.chunk_tokens(each))
            for each in behind
        ]
        num_steady = len(self._running) - len(without) - len(behind)
        budget = limits.max_num_batched_tokens - num_steady
        budget -= sum(map(min, wanted))
        missing = sequence.num_tokens - prefix.num_tokens
        if missing <= min(budget, limits.chunk_tokens(sequence)):
            return False
        num_partial = sum(count > chunk for count, chunk in wanted)
        return budget <= 0 or num_partial >= limits.max_num_partial_prefills
