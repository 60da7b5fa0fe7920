"""Compiles structures on a thread of its own, and keeps what it compiled."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from runtime.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    LockstepError,
    UnavailableError,
)
from runtime.grammar.limits import GrammarLimits
from runtime.grammar.matcher import CompiledGrammar
from runtime.grammar.source import write_source
from runtime.grammar.tokenizer import GrammarTokenizer
from runtime.grammar.vetter import Vetter
from runtime.grammar.vocabulary import Vocabulary
from runtime.structure import Structure

log = logging.getLogger(__name__)

Outcome = CompiledGrammar | LockstepError
OnDone = Callable[[Outcome], None]
IsWanted = Callable[[], bool]
Call = Callable[[], None]

CLOSE_TIMEOUT_S = 5.0
RETRY_S = 1.0


class _Waiter(NamedTuple):
    on_done: OnDone
    is_wanted: IsWanted


class GrammarCompiler:
    """One structure at a time, first come, first served; equal ones are compiled once.

    The vocabulary is read at once, which holds the interpreter for about a second in all: create
    this before there is anything to decode.
    """

    def __init__(
        self,
        model_path: str,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._limits = limits or GrammarLimits()
        self._vetter = Vetter(self._limits)
        self._lock = threading.Lock()  # of the four below
        self._jobs: SimpleQueue[Structure | Call | None] = SimpleQueue()
        self._waiting: dict[Structure, list[_Waiter]] = {}
        self._compiled: OrderedDict[Structure, CompiledGrammar] = OrderedDict()
        self._closed = False
        self._thread = threading.Thread(
            target=self._run,
            args=(model_path, vocab_size, tuple(eos_token_ids)),
            name="grammar-compiler",
            daemon=True,
        )
        self._thread.start()

    def compile(
        self, structure: Structure, on_done: OnDone, is_wanted: IsWanted = lambda: True
    ) -> None:
        """Never blocks.

        `on_done` is called exactly once: with the compiled structure, or with what is wrong with
        it, with CapacityError where too many others wait, or with UnavailableError after `close`
        and where nobody wants it any more. At once where the outcome is known, and else on the
        compiler's thread, which asks `is_wanted` before it begins.
        """
        outcome: Outcome | None
        with self._lock:
            if self._closed:
                outcome = UnavailableError("the engine is stopping")
            else:
                outcome = self._find(structure)
                if outcome is None:
                    outcome = self._enqueue(structure, _Waiter(on_done, is_wanted))
        if outcome is not None:
            on_done(outcome)

    def run(self, call: Call) -> None:
        """Runs a call on the compiler's thread, after what waits there; after `close` never."""
        self._jobs.put(call)

    def close(self) -> None:
        """Answers all that wait with UnavailableError, and ends the helper process. Idempotent."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
            self._compiled.clear()
        self._vetter.cancel()
        self._jobs.put(None)
        for waiter in (waiter for some in waiting.values() for waiter in some):
            waiter.on_done(UnavailableError("the engine is stopping"))
        # A compilation under way ends by its own limits.
        self._thread.join(CLOSE_TIMEOUT_S)

    def _find(self, structure: Structure) -> CompiledGrammar | None:
        found = self._compiled.get(structure)
        if found is None or found.worn:
            return None
        self._compiled.move_to_end(structure)
        return found

    def _enqueue(self, structure: Structure, waiter: _Waiter) -> CapacityError | None:
        waiting = self._waiting.get(structure)
        if waiting is not None:
            waiting.append(waiter)
            return None
        if len(self._waiting) >= self._limits.max_pending:
            return CapacityError(
                f"{len(self._waiting)} structures wait to be compiled: "
                f"max_pending={self._limits.max_pending}; try again in {RETRY_S:g} s",
                retry_after_s=RETRY_S,
            )
        self._waiting[structure] = [waiter]
        self._jobs.put(structure)
        return None

    def _run(self, model_path: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        tokenizer = self._read_tokenizer(model_path, vocab_size, eos_token_ids)
        try:
            while (job := self._jobs.get()) is not None:
                if not isinstance(job, Structure):
                    job()
                elif self._is_wanted(job):
                    self._finish(job, self._outcome(tokenizer, job))
        finally:
            self._vetter.close()

    def _read_tokenizer(
        self, model_path: str, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> GrammarTokenizer | str:
        """The model's, or what to tell each request that asks for a structure."""
        try:
            vocabulary = Vocabulary.read(model_path, vocab_size=vocab_size)
            return GrammarTokenizer(vocabulary, eos_token_ids=eos_token_ids, limits=self._limits)
        except ConfigError as error:
            return str(error)
        except Exception as error:  # the edge of the thread: who waits for it must be answered
            log.exception("the model's tokenizer can't be used for structures")
            return f"the model's tokenizer can't be used: {type(error).__name__}"

    def _outcome(self, tokenizer: GrammarTokenizer | str, structure: Structure) -> Outcome:
        if isinstance(tokenizer, str):
            return InvalidRequestError(f"{structure.kind} isn't possible: {tokenizer}")
        try:
            return self._compile(tokenizer, structure)
        except (InvalidRequestError, UnavailableError) as error:
            return error
        except Exception as error:  # the thread must go on for the other requests
            log.exception("a structure can't be compiled")
            return UnavailableError(f"{structure.kind} can't be compiled: {error!r}")

    def _compile(self, tokenizer: GrammarTokenizer, structure: Structure) -> CompiledGrammar:
        source = write_source(structure, max_bytes=self._limits.max_source_bytes)
        try:
            self._vetter.vet(source, structure.kind)
            grammar = CompiledGrammar(tokenizer, structure.kind, source)
            grammar.check_first_mask()
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{structure.kind} is refused: {error}") from error
        return grammar

    def _is_wanted(self, structure: Structure) -> bool:
        """Whether anybody still waits for it; those who don't want it are answered."""
        with self._lock:
            asked = self._waiting.get(structure, [])[:]
        if any(waiter.is_wanted() for waiter in asked):
            return True
        with self._lock:
            # More may have come since, or `close` has answered them all.
            waiting = self._waiting.pop(structure, None)
            dropped = [] if waiting is None else asked
            more = [] if waiting is None else waiting[len(asked) :]
            if more:
                self._waiting[structure] = more
        for waiter in dropped:
            waiter.on_done(UnavailableError(f"{structure.kind}: nobody waits for it any more"))
        return bool(more)

    def _finish(self, structure: Structure, outcome: Outcome) -> None:
        with self._lock:
            if isinstance(outcome, CompiledGrammar) and not self._closed:
                self._compiled[structure] = outcome
                self._compiled.move_to_end(structure)
                if len(self._compiled) > self._limits.max_cached:
                    self._compiled.popitem(last=False)
            waiting = self._waiting.pop(structure, [])
        for waiter in waiting:
            waiter.on_done(outcome)
