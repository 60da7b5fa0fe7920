"""The running sequences that have caught up with their tokens, and when they need something."""

from collections.abc import Collection, Iterable

from runtime.scheduling.sequence import Sequence


class SteadySet:
    """Its members feed one token in every step, so the steps that matter are known ahead."""

    def __init__(self) -> None:
        self._members: tuple[Sequence, ...] = ()
        self._ids: list[int] = []
        self._left: set[int] = set()  # who has, since the members were looked at
        self._growing = _Timetable()
        self._ending = _Timetable()

    @property
    def members(self) -> tuple[Sequence, ...]:
        """The same object as long as nobody joins or leaves."""
        self._forget_left()
        return self._members

    def ids_of(self, members: tuple[Sequence, ...]) -> list[int]:
        """Of those that were the members once; quickly where they still are."""
        if members is self.members:
            return self._ids
        return [each.sequence_id for each in members]

    @property
    def ids(self) -> list[int]:
        """Of the members, in their order."""
        self._forget_left()
        return self._ids

    def join(self, sequence: Sequence, *, step_id: int, capacity: int) -> None:
        """A sequence will feed its last token in step `step_id`; its tables reach `capacity`.

        It becomes a member with `add`.
        """
        tokens = sequence.num_planned_tokens
        self._growing.put(sequence, step_id + capacity + 1 - tokens)
        self._ending.put(sequence, step_id + sequence.max_num_tokens - 1 - tokens)

    def leave(self, sequence: Sequence) -> None:
        """A sequence isn't steady any more."""
        self._growing.remove(sequence)
        self._ending.remove(sequence)
        self._left.add(sequence.sequence_id)

    def add(self, joining: Collection[Sequence]) -> None:
        """Those that joined are members."""
        if joining:
            self._set([*self.members, *joining])

    def grow_at(self, sequence: Sequence, step_id: int) -> None:
        """A member needs a block in `step_id`."""
        self._growing.put(sequence, step_id)

    def take_growing(self, step_id: int) -> list[Sequence]:
        """Members that need a block in this step."""
        return self._growing.take(step_id)

    def take_ending(self, step_id: int) -> list[Sequence]:
        """Members whose token of this step is the last that they may have."""
        return self._ending.take(step_id)

    def check_invariants(self) -> None:
        ids = sorted(self.ids)
        assert ids == sorted(each.sequence_id for each in self.members)
        assert self._growing.ids() == ids == self._ending.ids(), "the timetables know others"

    def _forget_left(self) -> None:
        if self._left:
            self._set(each for each in self._members if each.sequence_id not in self._left)
            self._left = set()

    def _set(self, members: Iterable[Sequence]) -> None:
        self._members = tuple(members)
        self._ids = [each.sequence_id for each in self._members]


class _Timetable:
    """For each sequence one step, and the sequences of each step."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}  # by sequence id
        self._due: dict[int, dict[int, Sequence]] = {}  # by step and sequence id

    def put(self, sequence: Sequence, step_id: int) -> None:
        self._steps[sequence.sequence_id] = step_id
        self._due.setdefault(step_id, {})[sequence.sequence_id] = sequence

    def take(self, step_id: int) -> list[Sequence]:
        due = self._due.pop(step_id, {})
        for sequence_id in due:
            del self._steps[sequence_id]
        return list(due.values())

    def remove(self, sequence: Sequence) -> None:
        step_id = self._steps.pop(sequence.sequence_id, None)
        if step_id is None:  # taken
            return
        due = self._due[step_id]
        del due[sequence.sequence_id]
        if not due:
            del self._due[step_id]

    def ids(self) -> list[int]:
        return sorted(self._steps)
