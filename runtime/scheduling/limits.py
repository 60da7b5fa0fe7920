"""What a step may hold, and who may run and wait."""

from dataclasses import dataclass

from runtime.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What may wait; None: without limit. Requests that find free slots and blocks don't count."""

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None  # of prompts
    queue_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """`max_num_batched_tokens` is at least `max_num_seqs`: all that run feed a token each."""

    max_num_batched_tokens: int
    max_chunk_tokens: int  # most tokens that one sequence is fed in a step
    max_num_seqs: int
    max_model_len: int
    watermark: float = 0.0  # share of the blocks that admission leaves to running sequences
    max_num_partial_prefills: int = 1
    # Most tokens in a step of a prompt whose logprobs are wanted; logits take a vocabulary each.
    max_num_scored_tokens: int = 128
    queue: QueueLimits = QueueLimits()

    def chunk_tokens(self, sequence: Sequence) -> int:
        """Most tokens that this sequence is fed in a step."""
        if sequence.awaits_scores:
            return min(self.max_chunk_tokens, self.max_num_scored_tokens)
        return self.max_chunk_tokens
