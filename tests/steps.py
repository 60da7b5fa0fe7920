"""Steps of a scheduler: with tokens that a test gives, or with the oracle's."""

from collections.abc import Iterable
from collections.abc import Sequence as Ids

from runtime.executor.base import Executor
from runtime.request import TokenLogprobs
from runtime.scheduling.output import SchedulerOutput, StepOutcome
from runtime.scheduling.sampler_inputs import no_inputs
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks, no_masks
from tests.scheduling import OracleExecutor, make_sequence, make_table, oracle_continuation

MAX_STEPS = 5000


def shares(output: SchedulerOutput) -> list[tuple[int, int]]:
    """Sequence ids and the tokens that each is fed, in the plan's order."""
    steady = [(each.sequence_id, 1) for each in output.steady]
    return steady + [
        (each.sequence.sequence_id, each.num_scheduled_tokens) for each in output.scheduled
    ]


def ids(sequences: Iterable[Sequence]) -> list[int]:
    return [each.sequence_id for each in sequences]


def finish(
    scheduler: Scheduler, output: SchedulerOutput, *, token: int = 5, now: float = 0.0
) -> StepOutcome:
    """The step in flight brings `token` for everyone who samples."""
    sampled = ids([*output.steady, *(each.sequence for each in output.scheduled if each.samples)])
    num_scored = sum(len(each.scored) for each in output.scheduled)
    result = StepResult(
        step_id=output.step_id,
        sequence_ids=sampled,
        token_ids=[token] * len(sampled),
        scores=[TokenLogprobs(-1.0, (), ())] * num_scored,
    )
    outcome = scheduler.update(result, now)
    scheduler.check_invariants()
    return outcome


def execute(executor: Executor, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
    """Hands a step over and waits for it."""
    executor.submit(plan)
    if plan.defer_sampling:
        executor.sample(plan.step_id, no_inputs(), masks or no_masks())
    return executor.result()


def step(scheduler: Scheduler, *, token: int = 5, now: float = 0.0) -> SchedulerOutput:
    output = scheduler.schedule(now)
    assert output is not None, "nothing runs"
    finish(scheduler, output, token=token, now=now)
    return output


def drain(scheduler: Scheduler) -> None:
    """Steps until nothing is left to do."""
    for _ in range(MAX_STEPS):
        if not scheduler.has_work:
            return
        step(scheduler)
    raise AssertionError("no progress")


def num_used(scheduler: Scheduler) -> int:
    """Blocks of the pool that somebody holds."""
    return scheduler.cache.pool.num_blocks - scheduler.cache.pool.num_free


def num_cached(scheduler: Scheduler, prefix: Ids[int], *, salt: str = "") -> int:
    """Tokens that a request which begins with `prefix` would find."""
    probe = make_sequence(999, [*prefix, 0], cache_salt=salt)
    return scheduler.cache.find_prefix(probe).num_tokens


def squeeze(scheduler: Scheduler, num_evicted: int) -> None:
    """Lets so many of the free blocks that keep a prefix lose it."""
    pool = scheduler.cache.pool
    blocks = pool.allocate(pool.num_free - pool.num_cached + num_evicted)
    pool.release(blocks)


class OracleRun:
    """A scheduler whose steps are flattened and executed by the oracle."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        layout = scheduler.cache.layout
        self.executor = OracleExecutor(layout)
        self.table = make_table(
            max_num_seqs=scheduler.limits.max_num_seqs, num_groups=len(layout.groups)
        )

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        assert output is not None, "nothing runs"
        self.scheduler.update(self.executor.execute(self.table.flatten(output)))
        self.scheduler.check_invariants()
        return output

    def crash(self) -> None:
        """Loses a step after it was sent, and the workers with it."""
        output = self.scheduler.schedule()
        assert output is not None, "nothing runs"
        self.table.flatten(output)
        self.scheduler.restart()
        self.executor.restart()
        self.scheduler.check_invariants()

    def finish(self, *sequences: Sequence) -> None:
        """Adds `sequences` and steps until nothing is left to do."""
        for sequence in sequences:
            self.scheduler.add(sequence)
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("no progress")


def output_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :].tolist()


def wanted_of(sequence: Sequence, *, windows: Ids[int] = (0,)) -> list[int]:
    """What the oracle says alone, for a sequence that was added."""
    params = sequence.params
    return oracle_continuation(
        sequence.token_ids[: sequence.num_prompt_tokens].tolist(),
        max_tokens=sequence.max_num_tokens - sequence.num_prompt_tokens,
        seed=sequence.seed,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        windows=windows,
    )


def assert_right(sequences: Iterable[Sequence], *, windows: Ids[int] = (0,)) -> None:
    """Every one has got what it would have got alone."""
    for sequence in sequences:
        assert output_of(sequence) == wanted_of(sequence, windows=windows), f"{sequence}"
