"""What an engine has done since its start."""

from dataclasses import dataclass

from runtime.errors import InvalidRequestError, LockstepError
from runtime.request import EngineStats
from runtime.scheduling.output import SchedulerOutput, StepOutcome
from runtime.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class Counters:
    """Changed on the engine's thread, read on any."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_scheduled_sequences: int = 0
    num_output_tokens: int = 0
    num_timed_out: int = 0
    num_invalid_logits: int = 0
    num_empty_supports: int = 0

    def count(self, output: SchedulerOutput, outcome: StepOutcome) -> None:
        self.num_steps += 1
        self.num_scheduled_tokens += output.num_scheduled_tokens
        self.num_scheduled_sequences += output.num_scheduled_sequences
        self.num_output_tokens += len(outcome.token_ids)

    def count_fault(self, error: LockstepError) -> None:
        """A request whose row couldn't be sampled: its parameters' fault, or the model's."""
        if isinstance(error, InvalidRequestError):
            self.num_empty_supports += 1
        else:
            self.num_invalid_logits += 1

    def stats(self, scheduler: Scheduler) -> EngineStats:
        """Together with what the scheduler counts; the numbers may be a step apart."""
        pool = scheduler.cache.pool
        return EngineStats(
            num_steps=self.num_steps,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_scheduled_sequences=self.num_scheduled_sequences,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=scheduler.running.num_preemptions,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_prompt_tokens=scheduler.admission.num_prompt_tokens,
            num_cached_tokens=scheduler.admission.num_cached_tokens,
            num_refused=scheduler.num_refused,
            num_timed_out=self.num_timed_out,
            num_invalid_logits=self.num_invalid_logits,
            num_empty_supports=self.num_empty_supports,
        )
