"""The sequences that wait: limits at the door, the order inside, and who waits too long."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import islice

from runtime.errors import CapacityError, DeadlineError, LockstepError
from runtime.scheduling.limits import QueueLimits
from runtime.scheduling.policy import Policy
from runtime.scheduling.sequence import Sequence

# So many at most are in the policy's order, to be passed over while it isn't their turn.
MAX_SCORED = 32
# A hint must not make clients that were refused at once come back at once.
MIN_RETRY_S = 0.1
MAX_RETRY_S = 60.0
# Weight of the latest admission in the mean wait.
WAIT_WEIGHT = 0.1

Dropped = tuple[Sequence, LockstepError]


class WaitingRoom:
    """Waiting sequences. Newcomers are those that were never admitted; only they are limited.

    A resumed one was let in before, by another engine: it is a newcomer here, as others have to
    wait for it, and no limit keeps it out.
    """

    def __init__(self, policy: Policy, limits: QueueLimits) -> None:
        self._policy = policy
        self._limits = limits
        self._members: dict[int, Sequence] = {}
        self._newcomers: dict[int, Sequence] = {}  # in order of arrival
        self._scored: set[int] = set()  # of those that the policy has, whose prompts are scored
        self._unscored: dict[int, Sequence] = {}  # that it will get when there are fewer
        self._is_backed_up = False  # the last step has left newcomers waiting
        self.num_newcomer_tokens = 0  # that they have
        self._times: list[tuple[float, int]] = []  # heap: when to look at which sequence
        self._mean_wait_s = 0.0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._members

    @property
    def has_scored(self) -> bool:
        """Whether there are any whose prompts are to be scored."""
        return bool(self._scored)

    def first(self, count: int) -> list[Sequence]:
        """The next `count` in the policy's order."""
        return list(islice(self._policy.order(), count))

    def add(self, sequence: Sequence, *, num_free_slots: int) -> None:
        """Lets a newcomer in; a resumed one before those of its class.

        Raises CapacityError: the queue is full, with a hint when to try again. Never for a resumed
        one.
        """
        # Of a request with several choices, which may have begun elsewhere, the first counts.
        if not sequence.is_resumed and sequence.first_choice is sequence:
            self._check_limits(sequence, num_free_slots)
        if sequence.awaits_scores and len(self._scored) >= MAX_SCORED:
            self._unscored[sequence.sequence_id] = sequence
        else:
            self._push(sequence)
        self._members[sequence.sequence_id] = sequence
        self._newcomers[sequence.sequence_id] = sequence
        self.num_newcomer_tokens += sequence.num_tokens
        times = [sequence.deadline_s]
        if self._limits.queue_timeout_s is not None:
            times.append(sequence.arrival_s + self._limits.queue_timeout_s)
        for time in times:
            if time is not None:
                heappush(self._times, (time, sequence.sequence_id))

    def add_front(self, sequence: Sequence) -> None:
        """A preempted sequence or a fork waits, before those of its class."""
        self._policy.push_front(sequence)
        if sequence.awaits_scores:
            self._scored.add(sequence.sequence_id)
        self._members[sequence.sequence_id] = sequence
        if sequence.deadline_s is not None:
            heappush(self._times, (sequence.deadline_s, sequence.sequence_id))

    def remove(self, sequence: Sequence) -> None:
        """A sequence waits no longer."""
        if self._unscored.pop(sequence.sequence_id, None) is None:
            self._policy.remove(sequence)
            self._scored.discard(sequence.sequence_id)
        while self._unscored and len(self._scored) < MAX_SCORED:
            self._push(self._unscored.pop(next(iter(self._unscored))))
        del self._members[sequence.sequence_id]
        if self._newcomers.pop(sequence.sequence_id, None) is not None:
            self.num_newcomer_tokens -= sequence.num_tokens

    def admit(self, sequence: Sequence, now: float) -> bool:
        """A sequence waits no longer, since it runs; whether it was a newcomer."""
        is_newcomer = sequence.sequence_id in self._newcomers
        if is_newcomer:
            waited_s = now - sequence.arrival_s
            self._mean_wait_s += WAIT_WEIGHT * (waited_s - self._mean_wait_s)
        self.remove(sequence)
        return is_newcomer

    def settle(self) -> None:
        """A step is decided: the newcomers that still wait had no room in it."""
        self._is_backed_up = bool(self._newcomers)

    def expire(self, now: float) -> list[Dropped]:
        """Removes and returns those that waited too long, each with what to tell its client."""
        dropped: list[Dropped] = []
        while self._times and self._times[0][0] <= now:
            _, sequence_id = heappop(self._times)
            sequence = self._members.get(sequence_id)
            if sequence is None:
                continue
            error = self._reason_to_drop(sequence, now)
            if error is not None:
                self.remove(sequence)
                dropped.append((sequence, error))
        self._shrink()
        return dropped

    def check_invariants(self) -> None:
        kept_back = len(self._unscored)
        assert len(self._policy) == len(self._members) - kept_back, "the policy keeps others"
        assert self._scored | self._unscored.keys() == {
            each.sequence_id for each in self._members.values() if each.awaits_scores
        }
        assert not kept_back or len(self._scored) >= MAX_SCORED
        assert self._newcomers.keys() <= self._members.keys()
        assert self.num_newcomer_tokens == sum(each.num_tokens for each in self._newcomers.values())

    def _push(self, sequence: Sequence) -> None:
        if sequence.is_resumed:
            self._policy.push_resumed(sequence)
        else:
            self._policy.push(sequence)
        if sequence.awaits_scores:
            self._scored.add(sequence.sequence_id)

    def _check_limits(self, sequence: Sequence, num_free_slots: int) -> None:
        num_queued = len(self._newcomers)
        # Slots are no room where blocks or tokens are missing.
        num_admissible = 0 if self._is_backed_up else num_free_slots
        if num_queued < num_admissible:
            return
        now = sequence.arrival_s
        most = self._limits.max_queued_requests
        if most is not None and num_queued - num_admissible >= most:
            raise self._full(f"{num_queued} requests wait: max_queued_requests={most}", now)
        most = self._limits.max_queued_tokens
        tokens = self.num_newcomer_tokens + sequence.num_tokens
        if most is not None and num_queued and tokens > most:
            raise self._full(
                f"with this prompt of {sequence.num_prompt_tokens} tokens, {tokens} tokens would "
                f"wait: max_queued_tokens={most}",
                now,
            )

    def _full(self, message: str, now: float) -> CapacityError:
        """With a hint: what newcomers have waited lately, or the first of them waits now."""
        waits = [now - first.arrival_s for first in islice(self._newcomers.values(), 1)]
        waited_s = max(self._mean_wait_s, *waits, MIN_RETRY_S)
        retry_after_s = min(MAX_RETRY_S, waited_s)
        return CapacityError(
            f"the queue is full, {message}; try again in {retry_after_s:.1f} s",
            retry_after_s=retry_after_s,
        )

    def _reason_to_drop(self, sequence: Sequence, now: float) -> LockstepError | None:
        if sequence.deadline_s is not None and sequence.deadline_s <= now:
            return DeadlineError("the call's deadline passed while the request waited")
        timeout_s = self._limits.queue_timeout_s
        is_limited = sequence.sequence_id in self._newcomers and not sequence.is_resumed
        if timeout_s is not None and is_limited and sequence.arrival_s + timeout_s <= now:
            return self._full(
                f"the request waited {timeout_s:g} s: queue_timeout_s={timeout_s:g}", now
            )
        return None

    def _shrink(self) -> None:
        """Forgets the times of those that have left, once they are most."""
        if len(self._times) > 4 * len(self._members) + 64:
            self._times = [each for each in self._times if each[1] in self._members]
            heapify(self._times)
