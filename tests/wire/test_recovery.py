"""An engine whose workers are lost: streams pause, and get the tokens they would have had."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from runtime import recovery as module
from runtime.engine import Engine
from runtime.errors import (
    CapacityError,
    InvalidRequestError,
    LockstepError,
    ModelOutputError,
    UnavailableError,
    WorkerError,
)
from runtime.recovery import NewEpoch, Recovery, Workforce
from runtime.request import Request, RequestFailure
from runtime.scheduling.limits import QueueLimits
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks
from runtime.structured import NoCompiler
from tests.params import complete_params
from tests.scheduling import make_scheduler
from tests.served import ScoringOracle, oracle_model

if TYPE_CHECKING:
    from runtime.connection import Connection

pytestmark = pytest.mark.wire

TIMEOUT_S = 20.0
OUTSIDE = WorkerError("rank 1 is gone: killed by signal 9", is_outside=True)
INSIDE = WorkerError("rank 0 failed: RuntimeError")


class Mortal(ScoringOracle):
    """Dies when it is told to, or by whatever makes `is_deadly` true."""

    def __init__(self, workers: "Workers") -> None:
        super().__init__(workers.layout)
        self._workers = workers

    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        self._workers.num_steps += 1
        error = self._workers.take_death(plan)
        if error is not None:
            raise error
        return super().execute(plan, masks)


class Workers:
    """Starts oracles, which die at the steps in `deaths`, counted over all epochs."""

    def __init__(self) -> None:
        self.layout = make_scheduler().cache.layout
        self.num_steps = 0
        self.num_epochs = 0
        self.deaths: dict[int, WorkerError] = {}
        self.is_deadly: Callable[[StepPlan], WorkerError | None] = lambda plan: None
        self.refusals: SimpleQueue[LockstepError] = SimpleQueue()  # of the next starts
        self.gate = threading.Event()  # starts wait for it
        self.gate.set()
        self.starting = threading.Event()
        self.on_lost: list[Callable[[WorkerError], None]] = []

    def start(self) -> Mortal:
        self.num_epochs += 1
        return Mortal(self)

    def restart(self) -> NewEpoch:
        self.starting.set()
        assert self.gate.wait(TIMEOUT_S)
        if not self.refusals.empty():
            raise self.refusals.get()
        return NewEpoch(self.start(), self.on_lost.append)

    def take_death(self, plan: StepPlan) -> WorkerError | None:
        return self.deaths.pop(self.num_steps, None) or self.is_deadly(plan)


class Stand:
    """An engine, and a client of it that keeps what comes."""

    def __init__(self, workers: Workers, engine: Engine) -> None:
        self.workers, self.engine = workers, engine
        self.readiness: SimpleQueue[str | None] = SimpleQueue()
        self.tokens: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.failures: dict[int, LockstepError] = {}
        self._left: dict[int, int] = {}
        self._ended: SimpleQueue[int] = SimpleQueue()
        engine.on_readiness(self.readiness.put)
        self.connection: Connection = engine.connect(self._take)

    def ask(self, request_id: int, *, max_tokens: int = 12, n: int = 1, **fields: Any) -> None:
        self._left[request_id] = n
        params = complete_params(max_tokens=max_tokens, n=n, ignore_eos=True)
        self.connection.add(
            Request(
                request_id=request_id,
                prompt_token_ids=[request_id, *range(2, 2 + request_id % 7)],
                params=params,
                seed=request_id,
                **fields,
            )
        )

    def wait(self, count: int) -> None:
        """For so many requests to end."""
        for _ in range(count):
            self._ended.get(timeout=TIMEOUT_S)

    def next_readiness(self) -> str | None:
        return self.readiness.get(timeout=TIMEOUT_S)

    def _take(self, outputs: Any) -> None:
        for output in outputs:
            if isinstance(output, RequestFailure):
                self.failures[output.request_id] = output.error
                self._ended.put(output.request_id)
                continue
            self.tokens[output.request_id, output.choice].extend(output.token_ids)
            if output.finish_reason is not None:
                self._left[output.request_id] -= 1
                if not self._left[output.request_id]:
                    self._ended.put(output.request_id)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.001)


@contextmanager
def standing(
    *, depth: int = 2, max_restarts: int = 6, find_cause: Any = None, **options: Any
) -> Iterator[Stand]:
    workers = Workers()
    scheduler = make_scheduler(**options)
    recovery = Recovery(
        Workforce(find_cause or (lambda error: error), workers.restart),
        max_restarts=max_restarts,
    )
    engine = Engine(
        model=oracle_model(scheduler),
        scheduler=scheduler,
        executor=workers.start(),
        compiler=NoCompiler("a test has no tokenizer"),
        depth=depth,
        recovery=recovery,
    )
    stand = Stand(workers, engine)
    engine.start()
    try:
        yield stand
    finally:
        workers.gate.set()
        engine.stop()


def undisturbed(ask: Callable[[Stand], int]) -> dict[tuple[int, int], list[int]]:
    with standing() as stand:
        stand.wait(ask(stand))
    return dict(stand.tokens)


def eight(stand: Stand) -> int:
    for request_id in range(1, 9):
        stand.ask(request_id, n=1 + request_id % 2)
    return 8


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("error", [OUTSIDE, INSIDE], ids=["outside", "inside"])
def test_every_request_gets_the_tokens_it_would_have_had(depth: int, error: WorkerError) -> None:
    expected = undisturbed(eight)
    with standing(depth=depth) as stand:
        stand.workers.deaths = {2: error, 9: error, 10: error, 25: error}
        stand.wait(eight(stand))
        assert stand.engine.stats().num_free_blocks == stand.engine.stats().num_blocks
    assert not stand.failures
    assert stand.tokens == expected
    assert stand.workers.num_epochs == 5


def test_readiness_is_told_when_it_changes() -> None:
    with standing() as stand:
        stand.workers.deaths = {3: OUTSIDE}
        stand.ask(1)
        stand.wait(1)
        assert "rank 1 is gone" in (stand.next_readiness() or "")
        assert stand.next_readiness() is None
        assert stand.engine.why_not_ready is None


def test_workers_that_are_lost_while_nothing_runs_are_replaced() -> None:
    with standing() as stand:
        first = stand.engine._executor
        stand.engine.lose(first, OUTSIDE)
        assert stand.next_readiness() is not None
        assert stand.next_readiness() is None
        stand.engine.lose(first, OUTSIDE)  # again: those are of an epoch that is over
        stand.ask(1)
        stand.wait(1)
        assert stand.workers.num_epochs == 2
        stand.workers.on_lost[0](OUTSIDE)
        assert stand.next_readiness() is not None
        assert stand.next_readiness() is None
    assert stand.workers.num_epochs == 3
    assert not stand.failures


def test_the_cause_behind_what_was_noticed_counts() -> None:
    """A broken stream is noticed first; that somebody killed the rank is known later."""
    with standing(find_cause=lambda error: OUTSIDE) as stand:
        deaths = iter([INSIDE] * 5)
        stand.workers.is_deadly = lambda plan: next(deaths, None)
        stand.ask(1)
        stand.wait(1)
    assert not stand.failures


def test_starts_that_fail_are_tried_again() -> None:
    with standing(max_restarts=4) as stand:
        for _ in range(3):
            stand.workers.refusals.put(WorkerError("rank 1 ended before it served"))
        stand.workers.deaths = {3: OUTSIDE}
        stand.ask(1)
        stand.wait(1)
    assert not stand.failures


def test_when_it_is_hopeless_all_fail_and_it_goes_on_trying() -> None:
    with standing(max_restarts=2) as stand:
        for _ in range(4):
            stand.workers.refusals.put(WorkerError("no GPU is left"))
        stand.workers.deaths = {3: OUTSIDE}
        stand.ask(1)
        stand.ask(2, n=2)
        stand.wait(2)
        assert {type(each) for each in stand.failures.values()} == {UnavailableError}
        assert "no GPU is left" in str(stand.failures[2])
        assert stand.next_readiness() is not None
        assert stand.next_readiness() is None
        stand.ask(3)
        stand.wait(1)
    assert stand.failures.keys() == {1, 2}
    assert len(stand.tokens[3, 0]) == 12


def test_while_it_is_hopeless_what_comes_is_refused() -> None:
    with standing(max_restarts=1) as stand:
        stand.workers.refusals.put(WorkerError("no GPU is left"))
        stand.workers.deaths = {1: OUTSIDE}
        stand.ask(1)
        stand.wait(1)
        stand.workers.gate.clear()
        stand.ask(2)
        stand.wait(1)
    assert "no GPU is left" in str(stand.failures[2])


def test_epochs_that_bring_nothing_are_hopeless_too() -> None:
    with standing(max_restarts=3) as stand:
        stand.workers.is_deadly = lambda plan: OUTSIDE
        stand.ask(1)
        stand.wait(1)
    assert isinstance(stand.failures[1], UnavailableError)
    assert stand.workers.num_epochs >= 4


def test_what_comes_and_goes_in_the_meantime() -> None:
    with standing(queue=QueueLimits(queue_timeout_s=0.05)) as stand:
        stand.workers.gate.clear()
        stand.workers.deaths = {3: OUTSIDE}
        stand.ask(1)
        stand.ask(2)
        assert stand.workers.starting.wait(TIMEOUT_S)
        stand.connection.abort(2)
        stand.ask(3)  # waits for longer than it may
        stand.wait(1)
        assert isinstance(stand.failures[3], CapacityError)
        stand.ask(4, was_accepted=True)
        stand.workers.gate.set()
        stand.wait(2)
        assert stand.engine.stats().num_free_blocks == stand.engine.stats().num_blocks
    assert stand.failures.keys() == {3}
    assert len(stand.tokens[1, 0]) == len(stand.tokens[4, 0]) == 12
    assert len(stand.tokens[2, 0]) < 12


def test_a_request_that_kills_its_workers_fails_and_no_other() -> None:
    expected = undisturbed(eight)
    with standing() as stand:
        # Its prompt begins with its id, as nothing else does.
        def is_poison(plan: StepPlan) -> WorkerError | None:
            starts = plan.input_ids[plan.positions == 0]
            return INSIDE if 5 in starts else None

        stand.workers.is_deadly = is_poison
        stand.wait(eight(stand))
        assert stand.engine.stats().num_free_blocks == stand.engine.stats().num_blocks
    assert stand.failures.keys() == {5}
    assert isinstance(stand.failures[5], ModelOutputError)
    assert {key: each for key, each in stand.tokens.items() if key[0] != 5} == {
        key: each for key, each in expected.items() if key[0] != 5
    }
    assert stand.workers.num_epochs == 5, "two together, two alone"


def test_an_engine_stops_while_it_waits_for_workers() -> None:
    with standing() as stand:
        stand.workers.gate.clear()
        stand.workers.deaths = {3: OUTSIDE}
        stand.ask(1)
        assert stand.workers.starting.wait(TIMEOUT_S)
        stand.engine.stop()
        stand.wait(1)
    assert "the engine is stopping" in str(stand.failures[1])


def test_an_engine_that_drains_finishes_with_new_workers() -> None:
    with standing() as stand:
        stand.workers.gate.clear()
        stand.workers.deaths = {3: OUTSIDE}
        stand.ask(1)
        assert stand.workers.starting.wait(TIMEOUT_S)
        stand.engine.drain()
        stand.ask(2)
        stand.wait(1)
        assert "draining" in str(stand.failures[2])
        stand.workers.gate.set()
        stand.wait(1)
        assert stand.engine.wait_idle(TIMEOUT_S)
    assert len(stand.tokens[1, 0]) == 12


def test_without_recovery_an_engine_ends_with_its_workers() -> None:
    workers, scheduler = Workers(), make_scheduler()
    engine = Engine(
        model=oracle_model(scheduler),
        scheduler=scheduler,
        executor=workers.start(),
        compiler=NoCompiler("a test has no tokenizer"),
    )
    stand = Stand(workers, engine)
    engine.start()
    workers.deaths = {2: OUTSIDE}
    stand.ask(1)
    stand.wait(1)
    assert engine.wait(TIMEOUT_S) is OUTSIDE
    assert stand.failures == {1: OUTSIDE}
    engine.stop()


def test_a_bug_of_ours_is_no_loss_of_workers() -> None:
    with standing() as stand:

        def fail(plan: StepPlan) -> WorkerError | None:
            raise InvalidRequestError("never raised by workers")

        stand.workers.is_deadly = fail
        stand.ask(1)
        stand.wait(1)
        assert stand.engine.wait(TIMEOUT_S) is not None
    assert stand.workers.num_epochs == 1
