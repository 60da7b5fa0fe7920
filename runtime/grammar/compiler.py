"""Compiles structures on a thread of its own, and keeps what it compiled."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from queue import SimpleQueue

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

CLOSE_TIMEOUT_S = 5.0
RETRY_S = 1.0


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
        self._jobs: SimpleQueue[Structure | None] = SimpleQueue()
        self._waiting: dict[Structure, list[OnDone]] = {}
        self._compiled: OrderedDict[Structure, CompiledGrammar] = OrderedDict()
        self._closed = False
        self._thread = threading.Thread(
            target=self._run,
            args=(model_path, vocab_size, tuple(eos_token_ids)),
            name="grammar-compiler",
            daemon=True,
        )
        self._thread.start()

    def compile(self, structure: Structure, on_done: OnDone) -> None:
        """Never blocks.

        `on_done` is called exactly once: with the compiled structure, or with what is wrong with
        it, with CapacityError where too many wait, or after `close` with UnavailableError. At once
        where the outcome is known, and else on the compiler's thread.
        """
        outcome: Outcome | None
        with self._lock:
            if self._closed:
                outcome = UnavailableError("the engine is stopping")
            else:
                outcome = self._find(structure)
                num_waiting = sum(map(len, self._waiting.values()))
                if outcome is None and num_waiting >= self._limits.max_pending:
                    outcome = CapacityError(
                        f"{num_waiting} requests wait for structures to be compiled: "
                        f"max_pending={self._limits.max_pending}; try again in {RETRY_S:g} s",
                        retry_after_s=RETRY_S,
                    )
                if outcome is None:
                    waiting = self._waiting.setdefault(structure, [])
                    waiting.append(on_done)
                    if len(waiting) == 1:
                        self._jobs.put(structure)
        if outcome is not None:
            on_done(outcome)

    def close(self) -> None:
        """Answers all that wait with UnavailableError, and ends the helper process. Idempotent."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
            self._compiled.clear()
        self._vetter.cancel()
        self._jobs.put(None)
        for on_done in (on_done for some in waiting.values() for on_done in some):
            on_done(UnavailableError("the engine is stopping"))
        # A compilation under way ends by its own limits.
        self._thread.join(CLOSE_TIMEOUT_S)

    def _find(self, structure: Structure) -> CompiledGrammar | None:
        found = self._compiled.get(structure)
        if found is None or found.worn:
            return None
        self._compiled.move_to_end(structure)
        return found

    def _run(self, model_path: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        tokenizer: GrammarTokenizer | str
        try:
            vocabulary = Vocabulary.read(model_path, vocab_size=vocab_size)
            tokenizer = GrammarTokenizer(
                vocabulary, eos_token_ids=eos_token_ids, limits=self._limits
            )
            del vocabulary
        except ConfigError as error:
            tokenizer = str(error)  # told to each request that asks for a structure
        try:
            while (structure := self._jobs.get()) is not None:
                self._finish(structure, self._outcome(tokenizer, structure))
        finally:
            self._vetter.close()

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
            return CompiledGrammar(tokenizer, structure.kind, source)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{structure.kind} is refused: {error}") from error

    def _finish(self, structure: Structure, outcome: Outcome) -> None:
        with self._lock:
            if isinstance(outcome, CompiledGrammar) and not self._closed:
                self._compiled[structure] = outcome
                self._compiled.move_to_end(structure)
                if len(self._compiled) > self._limits.max_cached:
                    self._compiled.popitem(last=False)
            waiting = self._waiting.pop(structure, [])
        for on_done in waiting:
            on_done(outcome)
