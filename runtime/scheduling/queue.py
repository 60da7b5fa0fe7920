"""Waiting sequences of one class, in order."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from runtime.scheduling.sequence import Sequence


class Queue:
    """Any of its sequences leaves in constant time."""

    def __init__(self) -> None:
        # By id. Those that were admitted before, here or elsewhere, come before the newcomers.
        self._known: OrderedDict[int, Sequence] = OrderedDict()
        self._newcomers: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known) + len(self._newcomers)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._known.values(), self._newcomers.values())

    @property
    def first_newcomer(self) -> Sequence | None:
        """None where there is none."""
        return next(iter(self._newcomers.values()), None)

    def push(self, sequence: Sequence) -> None:
        """A newcomer, behind all."""
        self._newcomers[sequence.sequence_id] = sequence

    def push_front(self, sequence: Sequence) -> None:
        """A preempted one or a fork, before all."""
        self._known[sequence.sequence_id] = sequence
        self._known.move_to_end(sequence.sequence_id, last=False)

    def push_resumed(self, sequence: Sequence) -> None:
        """Before the newcomers."""
        self._known[sequence.sequence_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """One that is here."""
        if self._known.pop(sequence.sequence_id, None) is None:
            del self._newcomers[sequence.sequence_id]
