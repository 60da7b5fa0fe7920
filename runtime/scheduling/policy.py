"""In which order sequences are admitted, and who has to make room."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from typing import Protocol

from runtime.scheduling.sequence import Sequence

# What a tenant gets in its turn, in tokens: about one usual request.
FAIR_QUANTUM = 2048


class Policy(Protocol):
    """Keeps the waiting sequences in order. Pure: time comes with the sequences' arrival."""

    preempts_for_admission: bool  # whether anybody yields to a waiting sequence

    def __len__(self) -> int: ...

    def push(self, sequence: Sequence) -> None:
        """A newcomer waits, behind those of its class."""
        ...

    def push_front(self, sequence: Sequence) -> None:
        """A preempted sequence or a fork waits, before those of its class."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """A waiting sequence is admitted, or gone."""
        ...

    def order(self) -> Iterator[Sequence]:
        """The waiting sequences, who is next first; not all of them need to come."""
        ...

    def charge(self, sequence: Sequence) -> None:
        """A sequence is admitted."""
        ...

    def refund(self, sequence: Sequence) -> None:
        """An admitted sequence has ended or is preempted."""
        ...

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Of the running sequences, the one with the greatest is preempted first."""
        ...

    def yields(self, running: Sequence, waiting: Sequence) -> bool:
        """Whether `running` may be preempted to admit `waiting`."""
        ...


class _Queue(OrderedDict[int, Sequence]):
    """Sequences by id, in order: any of them leaves in constant time."""

    def push(self, sequence: Sequence) -> None:
        self[sequence.sequence_id] = sequence

    def push_front(self, sequence: Sequence) -> None:
        self[sequence.sequence_id] = sequence
        self.move_to_end(sequence.sequence_id, last=False)


class FcfsPolicy:
    """First come, first served; the latest arrival is preempted first."""

    preempts_for_admission = False

    def __init__(self) -> None:
        self._queue = _Queue()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, sequence: Sequence) -> None:
        self._queue.push(sequence)

    def push_front(self, sequence: Sequence) -> None:
        self._queue.push_front(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self._queue[sequence.sequence_id]

    def order(self) -> Iterator[Sequence]:
        return iter(self._queue.values())

    def charge(self, sequence: Sequence) -> None:
        pass

    def refund(self, sequence: Sequence) -> None:
        pass

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.arrival,)

    def yields(self, running: Sequence, waiting: Sequence) -> bool:
        return False


class PriorityPolicy:
    """Lower `priority` first. A sequence gains one class for each `ageing_s` that it waits.

    That order never changes while sequences wait: class and age are one number, the time at which
    a request of class 0 would have come to stand in its place. Running sequences of strictly lower
    classes make room for those they haven't outwaited.
    """

    preempts_for_admission = True

    def __init__(self, *, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._classes: dict[int, _Queue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def push(self, sequence: Sequence) -> None:
        self._classes.setdefault(sequence.priority, _Queue()).push(sequence)

    def push_front(self, sequence: Sequence) -> None:
        self._classes.setdefault(sequence.priority, _Queue()).push_front(sequence)

    def remove(self, sequence: Sequence) -> None:
        queue = self._classes[sequence.priority]
        del queue[sequence.sequence_id]
        if not queue:
            del self._classes[sequence.priority]

    def order(self) -> Iterator[Sequence]:
        return merge(*(queue.values() for queue in self._classes.values()), key=self._standing)

    def charge(self, sequence: Sequence) -> None:
        pass

    def refund(self, sequence: Sequence) -> None:
        pass

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.priority, sequence.arrival)

    def yields(self, running: Sequence, waiting: Sequence) -> bool:
        lower = running.priority > waiting.priority
        return lower and self._standing(running) > self._standing(waiting)

    def _standing(self, sequence: Sequence) -> float:
        return sequence.arrival_s + sequence.priority * self._ageing_s


class _Tenant:
    """The waiting sequences of one tenant, and the tokens that it may still admit in its turn."""

    __slots__ = ("deficit", "has_turn", "queue")

    def __init__(self) -> None:
        self.queue = _Queue()
        self.deficit = 0
        self.has_turn = False

    @property
    def head(self) -> Sequence:
        return next(iter(self.queue.values()))


class FairPolicy:
    """Tenants take turns, by tokens: deficit round robin (Shreedhar and Varghese, 1995).

    A sequence costs its prompt and the most it may generate; what it didn't use is given back when
    it ends. Within a tenant first come, first served.
    """

    preempts_for_admission = False

    def __init__(self, *, quantum: int = FAIR_QUANTUM) -> None:
        self._quantum = quantum
        self._tenants: OrderedDict[str, _Tenant] = (
            OrderedDict()
        )  # who waits; whose turn it is first
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        self._tenants.setdefault(sequence.tenant, _Tenant()).queue.push(sequence)
        self._num_waiting += 1

    def push_front(self, sequence: Sequence) -> None:
        self._tenants.setdefault(sequence.tenant, _Tenant()).queue.push_front(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = self._tenants[sequence.tenant]
        del tenant.queue[sequence.sequence_id]
        self._num_waiting -= 1
        if not tenant.queue:
            # Nobody saves up turns while nothing waits.
            del self._tenants[sequence.tenant]

    def order(self) -> Iterator[Sequence]:
        """The head of the tenant whose turn it is, then those of the tenants after it."""
        if self._tenants:
            self._find_turn()
        return (tenant.head for tenant in self._tenants.values())

    def charge(self, sequence: Sequence) -> None:
        self._give(sequence.tenant, -_cost(sequence))

    def refund(self, sequence: Sequence) -> None:
        unused = _cost(sequence)
        if sequence.finish_reason is not None:
            unused = sequence.max_num_tokens - sequence.num_tokens + sequence.num_cached_tokens
        self._give(sequence.tenant, unused)

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.arrival,)

    def yields(self, running: Sequence, waiting: Sequence) -> bool:
        return False

    def _give(self, name: str, tokens: int) -> None:
        tenant = self._tenants.get(name)
        if tenant is not None:
            tenant.deficit += tokens

    def _find_turn(self) -> None:
        """Passes the turn on until it is with a tenant that can pay for its head."""
        num_passed = 0
        while True:
            name, tenant = next(iter(self._tenants.items()))
            if not tenant.has_turn:
                tenant.has_turn = True
                tenant.deficit += self._quantum
            if tenant.deficit >= _cost(tenant.head):
                return
            tenant.has_turn = False
            self._tenants.move_to_end(name)
            num_passed += 1
            if num_passed % len(self._tenants) == 0:
                self._skip_rounds()

    def _skip_rounds(self) -> None:
        """Gives everybody at once the rounds in which nobody could pay."""
        missing = min(_cost(each.head) - each.deficit for each in self._tenants.values())
        rounds = -(-missing // self._quantum) - 1
        for tenant in self._tenants.values():
            tenant.deficit += max(0, rounds) * self._quantum


def _cost(sequence: Sequence) -> int:
    """Tokens of the prompt and the most that may follow; forks share their source's prompt."""
    if sequence.fork_of is None:
        return sequence.max_num_tokens
    return sequence.max_num_tokens - sequence.num_prompt_tokens
