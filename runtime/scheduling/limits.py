"""What a step may hold, and who may run and wait."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What may wait; None: without limit. Requests that free slots are there for don't count."""

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None  # of prompts
    queue_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """`max_num_batched_tokens` is at least `max_num_seqs`: all that run feed a token each."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    watermark: float = 0.0  # share of the blocks that admission leaves to running sequences
    max_num_partial_prefills: int = 1
    long_prefill_token_threshold: int | None = None  # most tokens of one sequence in a step
    queue: QueueLimits = QueueLimits()

    @property
    def max_chunk_tokens(self) -> int:
        """Most tokens that one sequence is fed in a step."""
        threshold = self.long_prefill_token_threshold
        most = self.max_num_batched_tokens
        return most if threshold is None else min(threshold, most)
