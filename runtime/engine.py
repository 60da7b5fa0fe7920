"""The loop: schedule -> flatten -> execute -> update -> publish.

Everything the engine knows changes on its own thread; other threads leave it calls in an inbox.
"""

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from runtime.errors import InvalidRequestError, LockstepError, UnavailableError
from runtime.executor.base import Executor
from runtime.request import (
    EngineStats,
    ModelInfo,
    Request,
    RequestFailure,
    RequestOutput,
)
from runtime.scheduling.flatten import BatchTable
from runtime.scheduling.output import SchedulerOutput, SequenceUpdate
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

# Invariants are checked after so long without a request, so that nobody waits for the check.
IDLE_CHECK_S = 1.0
# A step that runs at stop may take so long; then the ranks are ended under it.
STOP_STEP_S = 2.0

Outputs = list[RequestOutput | RequestFailure]
# Called at most once a step, on the engine's thread; must not block.
Sink = Callable[[Outputs], None]


class Engine:
    """Serves one model: takes requests from connections, gives each its tokens step by step."""

    def __init__(self, *, model: ModelInfo, scheduler: Scheduler, executor: Executor) -> None:
        self.model = model
        self._scheduler = scheduler
        self._executor = executor
        self._table = BatchTable(
            max_num_seqs=scheduler.max_num_seqs, num_groups=len(scheduler.cache.layout.groups)
        )
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._sequence_ids = itertools.count(1)
        self._owners: dict[int, tuple[Connection, int]] = {}  # by sequence id
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._num_scheduled_sequences = 0
        self._num_output_tokens = 0
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
        pool = self._scheduler.cache.pool
        return EngineStats(
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_scheduled_sequences=self._num_scheduled_sequences,
            num_output_tokens=self._num_output_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
        )

    def submit(self, call: Callable[[], None]) -> None:
        """Runs `call` on the engine's thread, in order, between two steps."""
        self._inbox.put(call)
        if self._stopped:
            self._refuse_rest()

    def add(self, connection: "Connection", request: Request) -> None:
        """Admits a request or refuses it through its connection's sink.

        Engine's thread only, until the engine has ended.
        """
        if self._failure is not None:
            connection.sink([RequestFailure(request.request_id, self._failure)])
            return
        try:
            if request.request_id in connection.sequence_ids:
                raise InvalidRequestError(
                    f"request_id={request.request_id} is in use by a request that runs"
                )
            request.check(self.model)
        except LockstepError as error:
            connection.sink([RequestFailure(request.request_id, error)])
            return
        sequence = Sequence(
            next(self._sequence_ids),
            request.prompt_token_ids,
            params=request.params,
            seed=request.seed,
        )
        connection.sequence_ids[request.request_id] = sequence.sequence_id
        self._owners[sequence.sequence_id] = (connection, request.request_id)
        self._scheduler.add(sequence)

    def abort(self, connection: "Connection", request_id: int) -> None:
        """Forgets a request; nothing more comes for it. Engine's thread only."""
        sequence_id = connection.sequence_ids.pop(request_id, None)
        if sequence_id is not None:
            del self._owners[sequence_id]
            self._scheduler.abort(sequence_id)

    def _run(self) -> None:
        try:
            while True:
                self._drain_inbox()
                if self._scheduler.has_work:
                    self._step()
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
            return self._inbox.get()

    def _step(self) -> None:
        output = self._scheduler.schedule()
        assert output is not None, "work is queued, nothing is in flight and nothing runs"
        result = self._executor.execute(self._table.flatten(output))
        updates = self._scheduler.update(result)
        self._count(output, updates)
        self._publish(updates)

    def _count(self, output: SchedulerOutput, updates: list[SequenceUpdate]) -> None:
        self._num_steps += 1
        self._num_scheduled_tokens += output.num_scheduled_tokens
        self._num_scheduled_sequences += len(output.scheduled)
        self._num_output_tokens += sum(len(update.new_token_ids) for update in updates)

    def _publish(self, updates: list[SequenceUpdate]) -> None:
        outputs: defaultdict[Connection, Outputs] = defaultdict(list)
        for update in updates:
            if not update.new_token_ids:
                continue
            sequence_id = update.sequence.sequence_id
            connection, request_id = self._owners[sequence_id]
            outputs[connection].append(
                RequestOutput(request_id, update.new_token_ids, update.finish_reason)
            )
            if update.finish_reason is not None:
                del self._owners[sequence_id]
                del connection.sequence_ids[request_id]
        for connection, batch in outputs.items():
            connection.sink(batch)

    def _end(self, error: LockstepError) -> None:
        self._failure = error
        failures: defaultdict[Connection, Outputs] = defaultdict(list)
        for connection, request_id in self._owners.values():
            failures[connection].append(RequestFailure(request_id, error))
        for connection, batch in failures.items():
            connection.sequence_ids.clear()
            connection.sink(batch)
        self._owners.clear()
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
        self.sequence_ids: dict[int, int] = {}  # by request id; engine's thread only
        self._engine = engine

    def add(self, request: Request) -> None:
        """Queues a request. Refusals come through the sink."""
        self._engine.submit(partial(self._engine.add, self, request))

    def abort(self, request_id: int) -> None:
        """Ends a request, which delivers nothing afterwards; unknown ids are ignored."""
        self._engine.submit(partial(self._engine.abort, self, request_id))

    def close(self) -> None:
        """Ends all requests of this connection."""
        self._engine.submit(self._abort_all)

    def _abort_all(self) -> None:
        for request_id in list(self.sequence_ids):
            self._engine.abort(self, request_id)
