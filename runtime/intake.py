"""What becomes of a request between its arrival and the scheduler's queue."""

from collections.abc import Callable, Mapping
from functools import partial

from runtime.errors import CapacityError, LockstepError
from runtime.grammar.matcher import CompiledGrammar
from runtime.live_requests import LiveRequests
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence
from runtime.structure import Structure
from runtime.structured import Matchers, StructuredSequences

Choices = Mapping[int, Sequence]


class Intake:
    """Queues the choices of requests, by their index. For one thread, the engine's.

    `submit` has a call run on that thread; `fail` tells the client of a sequence why it failed, and
    forgets its request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        live: LiveRequests,
        structured: StructuredSequences,
        *,
        clock: Callable[[], float],
        submit: Callable[[Callable[[], None]], None],
        fail: Callable[[int, LockstepError], object],
    ) -> None:
        self._scheduler = scheduler
        self._live = live
        self._structured = structured
        self._clock = clock
        self._submit = submit
        self._fail = fail

    def add(self, choices: Choices, structure: Structure | None, *, is_limited: bool) -> None:
        """Queues them once their structure is ready: until then they hold no slot.

        Those that aren't `is_limited` don't count against limits of the queue.
        """
        if structure is None:
            self._queue(choices)
            return

        def on_done(compiled: CompiledGrammar | LockstepError) -> None:
            self._submit(partial(self._take, choices, compiled))

        def is_wanted() -> bool:
            return bool(self._live.among(choices))

        try:
            self._structured.compile(structure, on_done, is_wanted, is_limited=is_limited)
        except CapacityError as error:
            self._fail_any(choices, error)

    def _take(self, choices: Choices, compiled: CompiledGrammar | LockstepError) -> None:
        if isinstance(compiled, LockstepError):
            self._structured.num_compiling -= 1
            self._fail_any(choices, compiled)
            return

        def on_done(matchers: Matchers) -> None:
            self._submit(partial(self._begin, choices, matchers))

        self._structured.replay(choices, compiled, on_done)

    def _begin(self, choices: Choices, matchers: Matchers) -> None:
        self._structured.num_compiling -= 1
        # A choice that was aborted while the structure was made ready isn't known any more.
        live = self._live.among(choices)
        try:
            self._structured.start(live, matchers)
        except LockstepError as error:
            self._fail_any(live, error)
            return
        if live:
            self._queue(choices)
        for index in choices.keys() - live.keys():
            self._scheduler.abort(choices[index].sequence_id)

    def _queue(self, choices: Choices) -> None:
        try:
            for each in choices.values():
                if each.fork_of is None:
                    self._scheduler.add(each, self._clock())
        except CapacityError as error:
            self._fail_any(choices, error)

    def _fail_any(self, choices: Choices, error: LockstepError) -> None:
        for sequence in self._live.among(choices).values():
            self._fail(sequence.sequence_id, error)  # and the others with it
            return
