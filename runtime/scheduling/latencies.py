"""How long requests take, and how much they ask for and get."""

from collections import Counter
from collections.abc import Collection

from runtime.histogram import FIRST_TOKEN_S, NUM_TOKENS, REQUEST_S, TOKEN_GAP_S, Histogram
from runtime.request import FinishReason, Start
from runtime.scheduling.sequence import Sequence


class Latencies:
    """Counts what happens to sequences; all times are of the scheduler's clock.

    A request counts once, with its choice 0, however many choices it has.
    """

    def __init__(self) -> None:
        self.queue_s = Histogram(FIRST_TOKEN_S)
        self.ttft_s = Histogram(FIRST_TOKEN_S)
        self.e2e_s = Histogram(REQUEST_S)
        self.itl_s = Histogram(TOKEN_GAP_S)
        self.prompt_tokens = Histogram(NUM_TOKENS)
        self.output_tokens = Histogram(NUM_TOKENS)
        self.num_finished: Counter[FinishReason] = Counter()

    def admit(self, sequence: Sequence, now: float) -> None:
        """A sequence runs, for the first time or again."""
        first = sequence.first_choice
        if first.admitted_s is None:
            first.admitted_s = now
            self.queue_s.observe(now - first.submitted_s)
            self.prompt_tokens.observe(first.num_prompt_tokens)

    def step(
        self,
        caught_up: Collection[Sequence],
        *,
        num_tokens: int,
        since: float,
        now: float,
    ) -> dict[int, Start]:
        """So many sequences got a token; returns the starts of those that never had one here.

        By sequence id. `caught_up` may have got one, unless they have ended; all others are steady
        and got one at `since` too, so that they count at once.
        """
        starts: dict[int, Start] = {}
        num_steady = num_tokens
        for sequence in caught_up:
            if sequence.finish_reason is not None:
                continue
            num_steady -= 1
            if sequence.last_token_s is None:
                starts[sequence.sequence_id] = self._start(sequence, now)
            else:
                self.itl_s.observe(now - sequence.last_token_s)
            sequence.last_token_s = now
        if num_steady:
            self.itl_s.observe(now - since, num_steady)
        return starts

    def end(self, sequence: Sequence, now: float) -> None:
        """A sequence has ended, and its finish reason says why."""
        reason = sequence.finish_reason
        assert reason is not None, f"{sequence} goes on"
        self.num_finished[reason] += 1
        # A held fork has no prompt. What another engine gave was counted there.
        num_new = sequence.num_output_tokens - sequence.num_resumed_tokens
        self.output_tokens.observe(max(num_new, 0))
        first = sequence.first_choice
        first.num_live_choices -= 1
        if first.num_live_choices == 0 and reason is not FinishReason.ABORT:
            self.e2e_s.observe(now - first.submitted_s)

    def _start(self, sequence: Sequence, now: float) -> Start:
        first = sequence.first_choice
        assert first.admitted_s is not None, f"{sequence} got a token before it ran"
        if first is sequence:
            self.ttft_s.observe(now - first.submitted_s)
        return Start(queue_s=first.admitted_s - first.submitted_s, prefill_s=now - first.admitted_s)
