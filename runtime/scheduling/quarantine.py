"""Sequences that may have been what ended an epoch."""

from collections.abc import Collection, Iterable

from runtime.scheduling.output import SchedulerOutput
from runtime.scheduling.sequence import Sequence

# Of so many epochs in a row that a sequence saw end, without a token in between: it runs alone.
SUSPECT_AFTER = 2
# Of those, in so many nothing else ran: it isn't tried again.
MAX_ENDS_ALONE = 2


class Quarantine:
    """Counts the epochs that ended with a sequence in a step, until it gets a token again.

    Epochs whose end had a cause outside aren't counted.
    """

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # by sequence id
        self._ends_alone: dict[int, int] = {}  # of those, in which nothing else ran
        self._suspects: dict[int, Sequence] = {}  # the first runs next

    @property
    def first(self) -> Sequence | None:
        """The sequence that is to run alone now."""
        return next(iter(self._suspects.values()), None)

    def note_end(self, outputs: Iterable[SchedulerOutput]) -> list[Sequence]:
        """An epoch ended with these steps in flight; returns those that aren't to run again."""
        seen = _live_of(outputs)
        for sequence in seen:
            ends = self._ends[sequence.sequence_id] = self._ends.get(sequence.sequence_id, 0) + 1
            if ends >= SUSPECT_AFTER:
                self._suspects.setdefault(sequence.sequence_id, sequence)
        if len(seen) > 1:
            return []
        for sequence in seen:
            alone = self._ends_alone.get(sequence.sequence_id, 0) + 1
            self._ends_alone[sequence.sequence_id] = alone
            if alone >= MAX_ENDS_ALONE:
                return [sequence]
        return []

    def note_tokens(self, sequences: Iterable[Sequence]) -> None:
        """These have got a token, or have ended: nothing is held against them."""
        for sequence in sequences if self._ends else ():
            self._ends.pop(sequence.sequence_id, None)
            self._ends_alone.pop(sequence.sequence_id, None)
            self._suspects.pop(sequence.sequence_id, None)

    def check_invariants(self, living: Collection[int]) -> None:
        assert self._suspects.keys() <= self._ends.keys() <= set(living)
        assert self._ends_alone.keys() <= self._ends.keys()


def _live_of(outputs: Iterable[SchedulerOutput]) -> list[Sequence]:
    found = {
        each.sequence_id: each
        for output in outputs
        for each in (*output.steady, *(one.sequence for one in output.scheduled))
        if each.finish_reason is None
    }
    return list(found.values())
