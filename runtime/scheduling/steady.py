"""The running sequences that have caught up with their tokens, and when they need something."""

from collections import defaultdict
from collections.abc import Collection

from runtime.scheduling.sequence import Sequence, Status

# A sequence, and the tokens that it has when its time comes.
Due = tuple[Sequence, int]


class SteadySet:
    """Its members feed one token in every step, so the steps that matter are known ahead.

    A member that leaves early stays in the timetable; it is told by its number of tokens, since it
    has fewer when its time comes.
    """

    def __init__(self) -> None:
        self.members: tuple[Sequence, ...] = ()
        self.ids: list[int] = []  # of the members
        self.has_left = False  # somebody has, since the last `refresh`
        self._grow: defaultdict[int, list[Due]] = defaultdict(list)  # by step
        self._end: defaultdict[int, list[Due]] = defaultdict(list)  # by step

    def join(self, sequence: Sequence, *, step_id: int, capacity: int) -> None:
        """A sequence will feed its last token in step `step_id`; its tables reach `capacity`.

        It becomes a member at the next `refresh`.
        """
        tokens = sequence.num_tokens
        self.grow_at(sequence, step_id=step_id + capacity + 1 - tokens, num_tokens=capacity + 1)
        last = sequence.max_num_tokens
        self._end[step_id + last - 1 - tokens].append((sequence, last))

    def grow_at(self, sequence: Sequence, *, step_id: int, num_tokens: int) -> None:
        """A member needs a block in `step_id`, where it has `num_tokens`."""
        self._grow[step_id].append((sequence, num_tokens))

    def refresh(self, joining: Collection[Sequence] = ()) -> None:
        """Those that joined are members, and those that don't run are not."""
        if not (joining or self.has_left):
            return
        self.has_left = False
        self.members = tuple(
            each for each in (*self.members, *joining) if each.status is Status.RUNNING
        )
        self.ids = [each.sequence_id for each in self.members]

    def take_growing(self, step_id: int) -> list[Sequence]:
        """Members that need a block in this step."""
        return _take(self._grow, step_id)

    def take_ending(self, step_id: int) -> list[Sequence]:
        """Members whose token of this step is the last that they may have."""
        return _take(self._end, step_id)

    def clear(self) -> None:
        self.members, self.ids, self.has_left = (), [], False
        self._grow.clear()
        self._end.clear()


def _take(timetable: defaultdict[int, list[Due]], step_id: int) -> list[Sequence]:
    return [
        sequence
        for sequence, num_tokens in timetable.pop(step_id, ())
        if sequence.status is Status.RUNNING and sequence.num_tokens == num_tokens
    ]
