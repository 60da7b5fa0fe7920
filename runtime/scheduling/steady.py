"""The running sequences that have caught up with their tokens, and when they need something."""

from collections.abc import Collection

from runtime.scheduling.sequence import Sequence, Status


class SteadySet:
    """Its members feed one token in every step, so the steps that matter are known ahead."""

    def __init__(self) -> None:
        self.members: tuple[Sequence, ...] = ()
        self.ids: list[int] = []  # of the members
        self._has_left = False  # somebody has, since the last `refresh`
        self._growing = _Timetable()
        self._ending = _Timetable()

    def join(self, sequence: Sequence, *, step_id: int, capacity: int) -> None:
        """A sequence will feed its last token in step `step_id`; its tables reach `capacity`.

        It becomes a member at the next `refresh`.
        """
        tokens = sequence.num_tokens
        self._growing.put(sequence, step_id + capacity + 1 - tokens)
        self._ending.put(sequence, step_id + sequence.max_num_tokens - 1 - tokens)

    def leave(self, sequence: Sequence) -> None:
        """A sequence isn't steady any more; it stops being a member at the next `refresh`."""
        self._growing.remove(sequence)
        self._ending.remove(sequence)
        self._has_left = True

    def refresh(self, joining: Collection[Sequence] = ()) -> None:
        """Those that joined are members, and those that don't run are not."""
        if not (joining or self._has_left):
            return
        self._has_left = False
        self.members = tuple(
            each for each in (*self.members, *joining) if each.status is Status.RUNNING
        )
        self.ids = [each.sequence_id for each in self.members]

    def grow_at(self, sequence: Sequence, step_id: int) -> None:
        """A member needs a block in `step_id`."""
        self._growing.put(sequence, step_id)

    def take_growing(self, step_id: int) -> list[Sequence]:
        """Members that need a block in this step."""
        return self._growing.take(step_id)

    def take_ending(self, step_id: int) -> list[Sequence]:
        """Members whose token of this step is the last that they may have."""
        return self._ending.take(step_id)

    def clear(self) -> None:
        """Everybody has left."""
        self.members, self.ids, self._has_left = (), [], False

    def check_invariants(self) -> None:
        ids = sorted(self.ids)
        assert ids == sorted(each.sequence_id for each in self.members)
        assert self._growing.ids() == ids == self._ending.ids(), "the timetables know others"


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
