"""The loop: schedule -> flatten -> submit, ahead of time; then result -> update -> publish.

Everything the engine knows changes on its own thread; other threads leave it calls in an inbox.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from runtime.choices import make_choices
from runtime.connection import Connection
from runtime.counters import Counters, StepTimes
from runtime.errors import (
    CapacityError,
    DeadlineError,
    LockstepError,
    UnavailableError,
    WorkerError,
)
from runtime.executor.base import Executor
from runtime.intake import Intake
from runtime.live_requests import LiveRequests, Sink
from runtime.mailbox import Mailbox
from runtime.recovery import Recovery
from runtime.request import EngineStats, FinishReason, ModelInfo, Request, RequestFailure
from runtime.scheduling.output import StepOutcome
from runtime.scheduling.scheduler import Scheduler
from runtime.step_pipeline import StepPipeline
from runtime.structured import Compiler, StructuredSequences

logger = logging.getLogger(__name__)

# One step runs, and the next is there when it ends.
DEPTH = 2
# Invariants are checked after so long without a request: 0.1 s for 100,000 blocks.
IDLE_CHECK_S = 1.0
# A step that runs at stop may take so long; then the ranks are ended under it.
STOP_STEP_S = 2.0
# What the scheduler says of requests that waited too long.
DROPPED_LATE = (CapacityError, DeadlineError)


class Engine:
    """Serves one model: takes requests from connections, gives each its tokens step by step.

    `clock` is seconds that never go back; a simulation brings its own, calls `add` and `step`
    itself and doesn't start the engine. `on_idle` is called when nothing has run for a second,
    `on_wait` in each step, when the workers have all that they can get.
    Up to `depth` steps are in flight: while the workers run one, the next is with them already.
    With `recovery` it outlives its workers: what ran waits for new ones. Without, it ends with
    them.
    """

    def __init__(
        self,
        *,
        model: ModelInfo,
        scheduler: Scheduler,
        executor: Executor,
        compiler: Compiler,
        depth: int = DEPTH,
        recovery: Recovery | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_idle: Callable[[], object] = lambda: None,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        self.model = model
        self.clock = clock
        self._on_idle = on_idle
        self._on_wait = on_wait
        self._scheduler = scheduler
        self._executor = executor
        self._mailbox = Mailbox()
        self._sequence_ids = itertools.count(1)
        self._live = LiveRequests()
        most = scheduler.limits.queue.max_queued_requests
        self._structured = StructuredSequences(compiler, max_compiling=most)
        self._intake = Intake(
            scheduler,
            self._live,
            self._structured,
            clock=clock,
            submit=self._mailbox.post,
            fail=self._fail,
        )
        self._pipeline = StepPipeline(
            scheduler,
            executor,
            self._structured,
            vocab_size=model.vocab_size,
            depth=depth,
            clock=clock,
        )
        self._recovery = recovery
        self._outage: LockstepError | None = None  # since recovery has given up, for now
        self.why_not_ready: str | None = None  # there are no workers; read on any thread
        self._on_readiness: list[Callable[[str | None], None]] = []
        self._counters = Counters()
        self._failure: LockstepError | None = None
        self._refusal: LockstepError | None = None  # of what comes while the engine drains
        self._on_drain: list[Callable[[], None]] = []
        self._drained = threading.Event()
        self._ended = threading.Event()
        self._ending: LockstepError | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the step that runs, or leaves it if it takes too long; fails all requests."""
        self.end(UnavailableError("the engine is stopping"))
        self._executor.close()
        self._mailbox.post(self._stop)
        self._thread.join()

    def end(self, error: LockstepError) -> None:
        """As `fail`; waits for the step that runs, and takes its ranks away if it is too long."""
        self.fail(error)
        if self.wait(STOP_STEP_S) is None:
            self._ending = error
            self._executor.close()

    def fail(self, error: LockstepError) -> None:
        """Ends all steps with `error`, which every live and later request gets."""
        self._mailbox.post(partial(self._raise, error))

    def wait(self, timeout_s: float | None = None) -> LockstepError | None:
        """Waits for the loop to end; returns what ended it, None after `timeout_s`."""
        return self._failure if self._ended.wait(timeout_s) else None

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the engine's thread when it drains or ends. Before the start."""
        self._on_drain.append(callback)

    def on_readiness(self, callback: Callable[[str | None], None]) -> None:
        """Calls `callback` on the engine's thread with each new `why_not_ready`.

        Before the start.
        """
        self._on_readiness.append(callback)

    def lose(self, executor: Executor, error: WorkerError) -> None:
        """The workers behind `executor` are gone, perhaps while no step runs. On any thread."""
        self._mailbox.post(partial(self._lose, executor, error))

    def drain(self) -> None:
        """Refuses what comes from now on, and goes on with what is here. On any thread."""
        self._mailbox.post(self._drain)

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits for the last request of an engine that drains; False: there are some still."""
        return self._drained.wait(timeout_s)

    def connect(self, sink: Sink) -> Connection:
        return Connection(self, sink)

    def stats(self) -> EngineStats:
        """May be called on any thread; the numbers may be a step apart."""
        return self._counters.stats(self._scheduler)

    def submit(self, call: Callable[[], None]) -> None:
        """Runs `call` on the engine's thread, in order, between two steps."""
        self._mailbox.post(call)

    def run_submitted(self) -> None:
        """Runs what was submitted. For who steps the engine; else its own thread does."""
        self._mailbox.run_all()

    def add(self, connection: Connection, request: Request, *, arrived_s: float) -> None:
        """Queues a request or refuses it through its connection's sink.

        Its deadline counts from `arrived_s`. Engine's thread only, until the engine has ended.
        """
        if connection.is_closed:  # while the request was on its way here
            return
        key = (connection, request.request_id)
        refusal = self._failure or self._refusal or self._outage
        if refusal is None:
            try:
                self._live.check_free(key)
                request.check(self.model)
            except LockstepError as error:
                refusal = error
        if refusal is not None:
            connection.sink([RequestFailure(request.request_id, refusal, was_refused=True)])
            return
        choices = make_choices(request, self._sequence_ids, arrived_s=arrived_s)
        self._live.add(key, choices)
        self._intake.add(choices, request.params.structure, is_limited=not request.was_accepted)

    def abort(self, connection: Connection, request_id: int, choice: int | None = None) -> None:
        """Forgets a request or one choice of it; nothing more comes. Engine's thread only."""
        key = (connection, request_id)
        if choice is None:
            self._drop(self._live.remove(key), FinishReason.ABORT)
        elif (sequence_id := self._live.remove_choice(key, choice)) is not None:
            # Its client has seen its end in the text: a stop string.
            self._drop([sequence_id], FinishReason.STOP)

    def abort_all(self, connection: Connection) -> None:
        """Forgets all requests of a connection, and takes no more. Engine's thread only."""
        connection.is_closed = True
        for request_id in self._live.of(connection):
            self.abort(connection, request_id)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> None:
        """Hands over steps until `depth` are in flight, waits for the oldest and publishes it.

        Engine's thread only. Raises WorkerError: the ranks are lost.
        """
        self._pipeline.fill()
        has_dropped = self._fail_dropped()
        self._on_wait()
        step = self._pipeline.finish()
        if step is None:
            assert has_dropped, "work is queued, nothing is in flight and nothing runs"
            return
        if self._recovery is not None:
            self._recovery.succeed()
        self._counters.count(step.output, step.outcome)
        self._live.publish(step.output, step.outcome)
        self._fail_choices(step.outcome)
        times = StepTimes(step.started, step.flattened, step.executed, self.clock())
        self._counters.time(step.output, step.execution, times)

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._serve()
                except WorkerError as error:
                    self._recover(error)
        except _EndedError as ended:
            self._end(ended.error)
        except LockstepError as error:
            self._end(self._ending or error)
        except Exception as error:  # the edge of the thread: a bug of ours, reported to everybody
            logger.exception("the engine failed")
            self._end(UnavailableError(f"the engine failed: {type(error).__name__}: {error}"))
        while not self._stopped:
            self._mailbox.run_next()  # an ended engine still refuses what comes
        self._mailbox.close()

    def _serve(self) -> None:
        """Until the workers are lost, which is raised, as is what ends the engine."""
        while True:
            self.run_submitted()
            while not self._scheduler.has_work:
                self._idle()
            self.step()

    def _recover(self, error: WorkerError) -> None:
        """New workers take over: what ran waits for them, and is computed again.

        Raises `error`: that isn't wanted.
        """
        if self._recovery is None or self._ending is not None:
            raise error
        logger.error("the workers are lost: %s", error)
        self._set_readiness(f"the workers are lost and started again: {error}")
        epoch, cause = self._recovery.run(
            error, post=self._mailbox.post, wait=self._wait_for_workers, give_up=self._fail_all
        )
        self._scheduler.restart(is_outside=cause.is_outside)
        self._fail_dropped()
        self._pipeline.restart(epoch.executor)
        self._executor, self._outage = epoch.executor, None
        self._counters.num_restarts += 1
        epoch.on_lost(partial(self.lose, epoch.executor))
        self._set_readiness(None)
        logger.warning("the workers are back; they were lost since %s", cause)

    def _wait_for_workers(self) -> None:
        """A turn of the time without workers, in which requests come, go and time out."""
        self._mailbox.run_next(IDLE_CHECK_S)
        self._scheduler.expire(self.clock())
        self._fail_dropped()

    def _fail_all(self, reason: LockstepError) -> None:
        """Fails what is here, and refuses what comes until there are workers again."""
        self._outage = UnavailableError(f"the workers can't be started, which goes on: {reason}")
        for sequence_id in self._live.sequence_ids():
            self._fail(sequence_id, self._outage)

    def _fail_dropped(self) -> bool:
        """Those that waited too long, or can't be run; whether there were any."""
        dropped = self._scheduler.take_dropped()
        for sequence, error in dropped:
            has_failed = self._fail(sequence.sequence_id, error)
            self._counters.num_timed_out += has_failed and isinstance(error, DROPPED_LATE)
        return bool(dropped)

    def _lose(self, executor: Executor, error: WorkerError) -> None:
        if executor is self._executor and self._failure is None and self.why_not_ready is None:
            raise error

    def _set_readiness(self, why_not: str | None) -> None:
        self.why_not_ready = why_not
        for callback in self._on_readiness:
            callback(why_not)

    def _idle(self) -> None:
        if self._refusal is not None and not self._live:
            self._drained.set()
        if not self._mailbox.run_next(IDLE_CHECK_S):
            self._scheduler.check_invariants()
            self._on_idle()
            self._mailbox.run_next()

    def _drop(self, sequence_ids: Iterable[int], reason: FinishReason) -> None:
        for sequence_id in sequence_ids:
            self._scheduler.abort(sequence_id, self.clock(), reason=reason)
            self._structured.forget(sequence_id)

    def _fail_choices(self, outcome: StepOutcome) -> None:
        """Those that the step couldn't sample, and whose structures can't go on."""
        # First: nothing can be sampled for these either, but here it is known why.
        for sequence_id, error in self._structured.take_failed():
            self._fail(sequence_id, error)
        for sequence, error in outcome.failed:
            if self._fail(sequence.sequence_id, error):
                self._counters.count_fault(error)

    def _fail(self, sequence_id: int, error: LockstepError) -> bool:
        """One choice of a request has failed, and the others go with it; False if it was gone."""
        key = self._live.key_of(sequence_id)
        if key is None:
            return False
        self._drop(self._live.remove(key), FinishReason.ABORT)
        client, request_id = key
        client.sink([RequestFailure(request_id, error)])
        return True

    def _end(self, error: LockstepError) -> None:
        self._failure = error
        if self._recovery is not None:
            self._recovery.stop()
        self._drain()  # first: who hears that a request has failed mustn't give it back to us
        self._live.fail_all(error)
        self._ended.set()
        self._drained.set()
        logger.info("the engine ended: %s", error)

    def _drain(self) -> None:
        if self._refusal is None:
            self._refusal = UnavailableError("the engine is draining and takes no more requests")
            for callback in self._on_drain:
                callback()

    def _raise(self, error: LockstepError) -> None:
        if self._failure is None:
            raise _EndedError(error)

    def _stop(self) -> None:
        self._stopped = True


class _EndedError(Exception):
    """Somebody has ended the engine with an error."""

    def __init__(self, error: LockstepError) -> None:
        super().__init__(str(error))
        self.error = error
