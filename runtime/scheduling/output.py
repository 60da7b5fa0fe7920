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

    @property
    def samples(self) -> bool:
        """Whether the step feeds the last known token, so that its successor is sampled."""
        end = self.num_computed_tokens + self.num_scheduled_tokens
        return end == self.sequence.num_tokens

    @property
    def scored(self) -> range:
        """Positions fed whose successors, tokens of the prompt, are to get logprobs."""
        sequence = self.sequence
        if not sequence.awaits_scores:
            return range(0)
        start = max(self.num_computed_tokens, sequence.num_scored_tokens)
        end = self.num_computed_tokens + self.num_scheduled_tokens
        return range(start, min(end, sequence.num_prompt_tokens - 1))


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
