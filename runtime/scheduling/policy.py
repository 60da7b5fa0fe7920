"""In which order sequences are admitted, and who has to make room."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from itertools import count, islice
from typing import Protocol

from runtime.scheduling.queue import Queue
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

    def push_resumed(self, sequence: Sequence) -> None:
        """One that another engine had before waits, before the newcomers of its class."""
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

    def settle(self, sequence: Sequence) -> None:
        """An admitted sequence has ended or is preempted."""
        ...

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Of the running sequences, the one with the greatest is preempted first."""
        ...

    def yields(self, running: Sequence, waiting: Sequence) -> bool:
        """Whether `running` may be preempted to admit `waiting`."""
        ...


class FcfsPolicy:
    """First come, first served; the latest arrival is preempted first."""

    preempts_for_admission = False

    def __init__(self) -> None:
        self._queue = Queue()

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, sequence: Sequence) -> None:
        self._queue.push(sequence)

    def push_front(self, sequence: Sequence) -> None:
        self._queue.push_front(sequence)

    def push_resumed(self, sequence: Sequence) -> None:
        self._queue.push_resumed(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)

    def order(self) -> Iterator[Sequence]:
        return iter(self._queue)

    def charge(self, sequence: Sequence) -> None:
        pass

    def settle(self, sequence: Sequence) -> None:
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
        self._classes: dict[int, Queue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def push(self, sequence: Sequence) -> None:
        self._classes.setdefault(sequence.priority, Queue()).push(sequence)

    def push_front(self, sequence: Sequence) -> None:
        self._classes.setdefault(sequence.priority, Queue()).push_front(sequence)

    def push_resumed(self, sequence: Sequence) -> None:
        queue = self._classes.setdefault(sequence.priority, Queue())
        if (first := queue.first_newcomer) is not None:
            # Nobody of another class may come between because of its late arrival here.
            sequence.arrival_s = min(sequence.arrival_s, first.arrival_s)
        queue.push_resumed(sequence)

    def remove(self, sequence: Sequence) -> None:
        queue = self._classes[sequence.priority]
        queue.remove(sequence)
        if not queue:
            del self._classes[sequence.priority]

    def order(self) -> Iterator[Sequence]:
        return merge(*self._classes.values(), key=self._standing)

    def charge(self, sequence: Sequence) -> None:
        pass

    def settle(self, sequence: Sequence) -> None:
        pass

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        return (self._standing(sequence), sequence.arrival)

    def yields(self, running: Sequence, waiting: Sequence) -> bool:
        lower = running.priority > waiting.priority
        return lower and self._standing(running) > self._standing(waiting)

    def _standing(self, sequence: Sequence) -> float:
        return sequence.arrival_s + sequence.priority * self._ageing_s


class _Tenant:
    """One tenant: its waiting sequences, and the tokens that it may still admit in its turn."""

    __slots__ = ("deficit", "has_turn", "num_running", "queue")

    def __init__(self) -> None:
        self.queue = Queue()
        self.num_running = 0
        self.deficit = 0
        self.has_turn = False

    @property
    def head_cost(self) -> int:
        return _cost(next(iter(self.queue)))


class FairPolicy:
    """Tenants take turns, by tokens: deficit round robin (Shreedhar and Varghese, 1995).

    What a sequence has to compute is charged at its admission, what it generated when it ends; so a
    tenant may come into debt for what it has running. Within a tenant first come, first served.
    """

    preempts_for_admission = False

    def __init__(self, *, quantum: int = FAIR_QUANTUM) -> None:
        self._quantum = quantum
        self._tenants: dict[str, _Tenant] = {}  # that have something waiting or running
        self._turns: OrderedDict[str, _Tenant] = OrderedDict()  # who waits; whose turn is first
        self._charges: dict[int, tuple[int, int]] = {}  # by sequence: its tokens then, the charge
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        self._tenant_of(sequence).queue.push(sequence)
        self._num_waiting += 1

    def push_front(self, sequence: Sequence) -> None:
        self._tenant_of(sequence).queue.push_front(sequence)
        self._num_waiting += 1

    def push_resumed(self, sequence: Sequence) -> None:
        self._tenant_of(sequence).queue.push_resumed(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = self._tenants[sequence.tenant]
        tenant.queue.remove(sequence)
        self._num_waiting -= 1
        if not tenant.queue:
            del self._turns[sequence.tenant]
            # Nobody saves up turns while nothing waits.
            tenant.deficit = min(tenant.deficit, 0)
            tenant.has_turn = False
            self._forget_if_gone(sequence.tenant, tenant)

    def order(self) -> Iterator[Sequence]:
        """The heads of the tenants, from the one whose turn it is on; then who is second there."""
        if self._turns:
            self._find_turn()
        return self._by_place()

    def charge(self, sequence: Sequence) -> None:
        tenant = self._tenants.setdefault(sequence.tenant, _Tenant())
        tenant.num_running += 1
        tokens = sequence.num_tokens - sequence.num_computed_tokens
        tenant.deficit -= tokens
        self._charges[sequence.sequence_id] = (sequence.num_tokens, tokens)

    def settle(self, sequence: Sequence) -> None:
        num_tokens, charged = self._charges.pop(sequence.sequence_id)
        tenant = self._tenants[sequence.tenant]
        tenant.num_running -= 1
        if sequence.finish_reason is None:
            tenant.deficit += charged  # preempted: it will compute all that again
        else:
            tenant.deficit -= sequence.num_tokens - num_tokens
        self._forget_if_gone(sequence.tenant, tenant)

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.arrival,)

    def yields(self, running: Sequence, waiting: Sequence) -> bool:
        return False

    def _tenant_of(self, sequence: Sequence) -> _Tenant:
        """The tenant of a sequence that begins to wait."""
        tenant = self._tenants.setdefault(sequence.tenant, _Tenant())
        self._turns.setdefault(sequence.tenant, tenant)
        return tenant

    def _forget_if_gone(self, name: str, tenant: _Tenant) -> None:
        if not (tenant.queue or tenant.num_running):
            del self._tenants[name]

    def _by_place(self) -> Iterator[Sequence]:
        for place in count():
            found = False
            for tenant in self._turns.values():
                for sequence in islice(tenant.queue, place, place + 1):
                    found = True
                    yield sequence
            if not found:
                return

    def _find_turn(self) -> None:
        """Passes the turn on until it is with a tenant that can pay for its head."""
        num_passed = 0
        while True:
            name, tenant = next(iter(self._turns.items()))
            if not tenant.has_turn:
                tenant.has_turn = True
                tenant.deficit += self._quantum
            if tenant.deficit >= tenant.head_cost:
                return
            tenant.has_turn = False
            self._turns.move_to_end(name)
            num_passed += 1
            if num_passed % len(self._turns) == 0:
                self._skip_rounds()

    def _skip_rounds(self) -> None:
        """Gives everybody at once the rounds in which nobody could pay."""
        missing = min(each.head_cost - each.deficit for each in self._turns.values())
        rounds = -(-missing // self._quantum) - 1
        for tenant in self._turns.values():
            tenant.deficit += max(0, rounds) * self._quantum


def _cost(sequence: Sequence) -> int:
    """Tokens to compute at most; a fork shares all but the last of its source's prompt."""
    is_fresh_fork = sequence.fork_of is not None and not sequence.num_output_tokens
    return 1 if is_fresh_fork else sequence.num_tokens
