"""What the scheduler decided for a step, and what the step brought."""

from dataclasses import dataclass

from runtime.request import FinishReason
from runtime.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step."""

    sequence: Sequence
    num_computed_tokens: int  # in the cache before the step
    num_scheduled_tokens: int  # fed in the step

    @property
    def samples(self) -> bool:
        """Whether the step feeds the last known token, so that its successor is sampled."""
        end = self.num_computed_tokens + self.num_scheduled_tokens
        return end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class BlocksAppended:
    """New blocks at the end of a sequence's tables, one list per cache group."""

    sequence_id: int
    blocks: tuple[list[int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """Who runs, how many tokens; and how the set of sequences that hold blocks has changed.

    The row events are in the order in which they are to be applied: removed, added, appended.
    """

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    removed: tuple[int, ...]  # sequence ids: finished, aborted, preempted since the last step
    added: tuple[Sequence, ...]  # admitted in this step
    appended: tuple[BlocksAppended, ...]

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(each.num_scheduled_tokens for each in self.scheduled)


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What a step brought for one sequence."""

    sequence: Sequence
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
