"""The loop: schedule -> flatten -> execute -> update -> publish.

Everything the engine knows changes on its own thread; other threads leave it calls in an inbox.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from runtime.errors import InvalidRequestError, LockstepError, UnavailableError
from runtime.executor.base import Executor
from runtime.live_requests import LiveRequests, Sink
from runtime.request import (
    EngineStats,
    ModelInfo,
    Request,
    RequestFailure,
)
from runtime.sampling_params import fork_seed
from runtime.scheduling.flatten import BatchTable
from runtime.scheduling.output import SchedulerOutput, StepOutcome
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

# Invariants are checked after so long without a request: 0.1 s for 100,000 blocks.
IDLE_CHECK_S = 1.0
# A step that runs at stop may take so long; then the ranks are ended under it.
STOP_STEP_S = 2.0


class Engine:
    """Serves one model: takes requests from connections, gives each its tokens step by step.

    `clock` is seconds that never go back; a simulation brings its own, calls `add` and `step`
    itself and doesn't start the engine. `on_idle` is called when nothing has run for a second.
    """

    def __init__(
        self,
        *,
        model: ModelInfo,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        on_idle: Callable[[], object] = lambda: None,
    ) -> None:
        self.model = model
        self.clock = clock
        self._on_idle = on_idle
        self._scheduler = scheduler
        self._executor = executor
        self._table = BatchTable(
            max_num_seqs=scheduler.limits.max_num_seqs,
            num_groups=len(scheduler.cache.layout.groups),
        )
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._sequence_ids = itertools.count(1)
        self._live = LiveRequests()
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._num_scheduled_sequences = 0
        self._num_output_tokens = 0
        self._num_timed_out = 0
        self._failure: LockstepError | None = None
        self._ended = threading.Event()
        self._ending: LockstepError | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the engine after the step that runs, or without it if it takes too long.

        Requests that live are failed, as are those that come afterwards.
        """
        self.end(UnavailableError("the engine is stopping"))
        self._executor.close()
        self._inbox.put(self._stop)
        self._thread.join()

    def end(self, error: LockstepError) -> None:
        """As `fail`; waits for the step that runs, and takes its ranks away if it is too long."""
        self.fail(error)
        if self.wait(STOP_STEP_S) is None:
            self._ending = error
            self._executor.close()

    def fail(self, error: LockstepError) -> None:
        """Ends all steps with `error`, which every live and later request gets."""
        self._inbox.put(partial(self._raise, error))

    def wait(self, timeout_s: float | None = None) -> LockstepError | None:
        """Waits for the loop to end; returns what ended it, None after `timeout_s`."""
        return self._failure if self._ended.wait(timeout_s) else None

    def connect(self, sink: Sink) -> "Connection":
        return Connection(self, sink)

    def stats(self) -> EngineStats:
        """May be called on any thread; the numbers may be a step apart."""
        scheduler = self._scheduler
        pool = scheduler.cache.pool
        return EngineStats(
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_scheduled_sequences=self._num_scheduled_sequences,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=scheduler.running.num_preemptions,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_prompt_tokens=scheduler.admission.num_prompt_tokens,
            num_cached_tokens=scheduler.admission.num_cached_tokens,
            num_refused=scheduler.num_refused,
            num_timed_out=self._num_timed_out,
        )

    def submit(self, call: Callable[[], None]) -> None:
        """Runs `call` on the engine's thread, in order, between two steps."""
        self._inbox.put(call)
        if self._stopped:
            self._refuse_rest()

    def add(self, connection: "Connection", request: Request, *, arrived_s: float) -> None:
        """Queues a request or refuses it through its connection's sink.

        Its deadline counts from `arrived_s`. Engine's thread only, until the engine has ended.
        """
        if self._failure is not None:
            connection.sink([RequestFailure(request.request_id, self._failure)])
            return
        try:
            if (connection, request.request_id) in self._live:
                raise InvalidRequestError(
                    f"request_id={request.request_id} is in use by a request that runs"
                )
            request.check(self.model)
            choices = self._make_choices(request, arrived_s)
            self._scheduler.add(choices[0], self.clock())
        except LockstepError as error:
            connection.sink([RequestFailure(request.request_id, error)])
            return
        self._live.add((connection, request.request_id), choices)

    def abort(self, connection: "Connection", request_id: int) -> None:
        """Forgets a request; nothing more comes for it. Engine's thread only."""
        for sequence_id in self._live.remove((connection, request_id)):
            self._scheduler.abort(sequence_id)

    def abort_all(self, connection: "Connection") -> None:
        """Forgets all requests of a connection. Engine's thread only."""
        for request_id in self._live.of(connection):
            self.abort(connection, request_id)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> None:
        """Runs one step, if there is one to run, and publishes it. Engine's thread only.

        Raises WorkerError: the ranks are lost, and the engine with them.
        """
        output = self._scheduler.schedule(self.clock())
        dropped = self._scheduler.take_dropped()
        for sequence, error in dropped:
            self._fail(sequence, error)
        if output is None:
            assert dropped, "work is queued, nothing is in flight and nothing runs"
            return
        result = self._executor.execute(self._table.flatten(output))
        outcome = self._scheduler.update(result, self.clock())
        self._count(output, outcome)
        self._live.publish(outcome)

    def _run(self) -> None:
        try:
            while True:
                self._drain_inbox()
                if self._scheduler.has_work:
                    self.step()
        except LockstepError as error:
            self._end(self._ending or error)
        except Exception as error:  # the edge of the thread: a bug of ours, reported to everybody
            logger.exception("the engine failed")
            self._end(UnavailableError(f"the engine failed: {type(error).__name__}: {error}"))
        while not self._stopped:
            self._inbox.get()()  # an ended engine still refuses what comes
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Answers what came too late for the loop; from any thread."""
        while True:
            try:
                call = self._inbox.get_nowait()
            except Empty:
                return
            call()

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()
        while not self._scheduler.has_work:
            self._wait_for_call()()

    def _wait_for_call(self) -> Callable[[], None]:
        try:
            return self._inbox.get(timeout=IDLE_CHECK_S)
        except Empty:
            self._scheduler.check_invariants()
            self._on_idle()
            return self._inbox.get()

    def _make_choices(self, request: Request, arrived_s: float) -> list[Sequence]:
        """One sequence per choice; all but the first are its forks."""
        first = Sequence(
            next(self._sequence_ids),
            request.prompt_token_ids,
            params=request.params,
            seed=request.seed,
            cache_salt=request.cache_salt,
            priority=request.priority,
            tenant=request.tenant,
            deadline_s=None if request.timeout_s is None else arrived_s + request.timeout_s,
        )
        others = (
            first.fork(next(self._sequence_ids), seed=fork_seed(request.seed, index))
            for index in range(1, request.params.n)
        )
        return [first, *others]

    def _count(self, output: SchedulerOutput, outcome: StepOutcome) -> None:
        self._num_steps += 1
        self._num_scheduled_tokens += output.num_scheduled_tokens
        self._num_scheduled_sequences += output.num_scheduled_sequences
        self._num_output_tokens += len(outcome.token_ids)

    def _fail(self, sequence: Sequence, error: LockstepError) -> None:
        """One choice of a request was dropped: the others go with it."""
        key = self._live.key_of(sequence.sequence_id)
        if key is None:  # another choice of it came before
            return
        self._num_timed_out += 1
        for sequence_id in self._live.remove(key):
            self._scheduler.abort(sequence_id)
        client, request_id = key
        client.sink([RequestFailure(request_id, error)])

    def _end(self, error: LockstepError) -> None:
        self._failure = error
        self._live.fail_all(error)
        self._ended.set()
        logger.info("the engine ended: %s", error)

    def _raise(self, error: LockstepError) -> None:
        if self._failure is None:
            raise error

    def _stop(self) -> None:
        self._stopped = True


class Connection:
    """One client of the engine, with request ids of its own. Its methods never block."""

    def __init__(self, engine: Engine, sink: Sink) -> None:
        self.sink = sink
        self._engine = engine

    def add(self, request: Request) -> None:
        """Queues a request. Refusals come through the sink."""
        arrived_s = self._engine.clock()
        self._engine.submit(partial(self._engine.add, self, request, arrived_s=arrived_s))

    def abort(self, request_id: int) -> None:
        """Ends a request, which delivers nothing afterwards; unknown ids are ignored."""
        self._engine.submit(partial(self._engine.abort, self, request_id))

    def close(self) -> None:
        """Ends all requests of this connection."""
        self._engine.submit(partial(self._engine.abort_all, self))
