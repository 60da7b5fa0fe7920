"""What an engine has done since its start, and how long its steps took."""

from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.errors import InvalidRequestError, LockstepError
from runtime.histogram import STEP_S, Histogram
from runtime.request import EngineStats, FinishReason, RankSummary, StepSeconds, StepSummary
from runtime.scheduling.output import SchedulerOutput, StepOutcome
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.step_plan import Execution


class StepTimes(NamedTuple):
    """When the parts of a step were over, in seconds of the engine's clock."""

    started: float
    flattened: float
    executed: float
    published: float


class _StepParts:
    """A histogram for each part of a step."""

    def __init__(self) -> None:
        self._schedule = Histogram(STEP_S)
        self._encode = Histogram(STEP_S)
        self._wire = Histogram(STEP_S)
        self._forward = Histogram(STEP_S)
        self._sample = Histogram(STEP_S)
        self._publish = Histogram(STEP_S)
        self._total = Histogram(STEP_S)
        self._last_executed = 0.0
        self._last_published = 0.0

    def observe(self, times: StepTimes, execution: Execution | None) -> float:
        """Returns the step's seconds, without those in which it waited for the step before.

        An executor that doesn't say what it did was on the wire all the time.
        """
        self._schedule.observe(times.flattened - times.started)
        # Not what was hidden behind the step before.
        wire_s = times.executed - max(times.flattened, self._last_executed)
        self._last_executed = times.executed
        if execution is not None:
            self._encode.observe(execution.encode_s)
            wire_s -= execution.encode_s
            for rank in execution.ranks[:1]:
                self._forward.observe(rank.forward_s)
                self._sample.observe(rank.sample_s)
                wire_s -= rank.forward_s + rank.sample_s
        self._wire.observe(max(wire_s, 0.0))  # the clocks of two hosts may differ in pace
        self._publish.observe(times.published - times.executed)
        total_s = times.published - max(times.started, self._last_published)
        self._last_published = times.published
        self._total.observe(total_s)
        return total_s

    def snapshot(self) -> StepSeconds:
        return StepSeconds(
            schedule=self._schedule.snapshot(),
            encode=self._encode.snapshot(),
            wire=self._wire.snapshot(),
            forward=self._forward.snapshot(),
            sample=self._sample.snapshot(),
            publish=self._publish.snapshot(),
            total=self._total.snapshot(),
        )


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
    num_restarts: int = 0
    last_step: StepSummary | None = None
    ranks: tuple[RankSummary, ...] = ()
    _parts: _StepParts = field(default_factory=_StepParts)

    def count(self, output: SchedulerOutput, outcome: StepOutcome) -> None:
        self.num_steps += 1
        self.num_scheduled_tokens += output.num_scheduled_tokens
        self.num_scheduled_sequences += output.num_scheduled_sequences
        self.num_output_tokens += len(outcome.token_ids)

    def time(self, output: SchedulerOutput, execution: Execution | None, times: StepTimes) -> None:
        """A step is over; `execution` is what the executor says of it."""
        total_s = self._parts.observe(times, execution)
        if execution is not None:
            self.ranks = execution.ranks
        self.last_step = StepSummary(
            step_id=output.step_id,
            num_decode_sequences=len(output.steady),
            num_prefill_sequences=len(output.scheduled),
            num_prefill_tokens=output.num_scheduled_tokens - len(output.steady),
            total_s=total_s,
        )

    def count_fault(self, error: LockstepError) -> None:
        """A request whose row couldn't be sampled: its parameters' fault, or the model's."""
        if isinstance(error, InvalidRequestError):
            self.num_empty_supports += 1
        else:
            self.num_invalid_logits += 1

    def stats(self, scheduler: Scheduler) -> EngineStats:
        """Together with what the scheduler counts; the numbers may be a step apart."""
        pool = scheduler.cache.pool
        latencies = scheduler.latencies
        return EngineStats(
            num_steps=self.num_steps,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_scheduled_sequences=self.num_scheduled_sequences,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=scheduler.running.num_preemptions,
            num_running=scheduler.running.num_holding,
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
            num_finished_stop=latencies.num_finished[FinishReason.STOP],
            num_finished_length=latencies.num_finished[FinishReason.LENGTH],
            num_finished_abort=latencies.num_finished[FinishReason.ABORT],
            max_num_seqs=scheduler.limits.max_num_seqs,
            max_num_batched_tokens=scheduler.limits.max_num_batched_tokens,
            queue_s=latencies.queue_s.snapshot(),
            ttft_s=latencies.ttft_s.snapshot(),
            e2e_s=latencies.e2e_s.snapshot(),
            itl_s=latencies.itl_s.snapshot(),
            prompt_tokens=latencies.prompt_tokens.snapshot(),
            output_tokens=latencies.output_tokens.snapshot(),
            step_s=self._parts.snapshot(),
            last_step=self.last_step,
            ranks=self.ranks,
            epoch=1 + self.num_restarts,
        )
