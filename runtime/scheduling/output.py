"""What the scheduler decided for a step, and what the step brought."""

from dataclasses import dataclass
from typing import NamedTuple

from runtime.errors import LockstepError
from runtime.request import Start, TokenLogprobs
from runtime.scheduling.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """The part in a step of a sequence that is behind with its tokens."""

    sequence: Sequence
    num_computed_tokens: int  # in the cache before the step
    num_scheduled_tokens: int  # fed in the step
    samples: bool  # whether the last of them is its last token, whose successor is sampled
    scored: range  # positions fed whose successors, tokens of the prompt, are to get logprobs

    @classmethod
    def of(cls, sequence: Sequence, num_scheduled_tokens: int) -> "ScheduledSequence":
        """The next tokens of a sequence, all of which are known."""
        start = sequence.num_computed_tokens
        end = start + num_scheduled_tokens
        scored = range(0)
        if sequence.awaits_scores:
            first = max(start, sequence.num_scored_tokens)
            scored = range(first, min(end, sequence.num_prompt_tokens - 1))
        samples = end == sequence.num_tokens
        return cls(sequence, start, num_scheduled_tokens, samples, scored)


class TableChange(NamedTuple):
    """What became of a sequence's block tables, one entry per cache group."""

    sequence_id: int
    first_blocks: tuple[int, ...]  # the blocks before these were given back
    appended: tuple[list[int], ...]


class BlockCopy(NamedTuple):
    """What a block holds is copied before the step."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """Who runs, how many tokens; and how the set of sequences that hold blocks has changed.

    The row events are in the order in which they are to be applied: removed, added, changed.
    """

    step_id: int
    # These feed their last token, the only one not computed, and sample. The very tuple of the
    # step before where nobody joined or left.
    steady: tuple[Sequence, ...]
    scheduled: tuple[ScheduledSequence, ...]  # the others that run
    removed: tuple[int, ...]  # sequence ids: finished, aborted, preempted since the last step
    added: tuple[Sequence, ...]  # admitted in this step
    changed: tuple[TableChange, ...]
    copies: tuple[BlockCopy, ...]
    # The step in flight that samples what the steady ones feed; None: that is known.
    awaited_step_id: int | None = None

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.steady) + sum(each.num_scheduled_tokens for each in self.scheduled)

    @property
    def num_scheduled_sequences(self) -> int:
        return len(self.steady) + len(self.scheduled)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step brought."""

    sequences: list[Sequence]  # that got a token
    token_ids: list[int]  # one each
    finished: list[Sequence]  # those of them that it ended
    failed: list[tuple[Sequence, LockstepError]]  # that couldn't be sampled, and have ended
    logprobs: dict[int, TokenLogprobs]  # of the tokens, by sequence id, of those that want them
    scores: dict[int, list[TokenLogprobs]]  # of the next tokens of prompts, by sequence id
    starts: dict[int, Start]  # by sequence id, of those whose first token here it is
