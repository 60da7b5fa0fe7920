"""The live sequences whose outputs must have a structure, and what they may go on with.

Which tokens a structure allows next is found by a matcher for each sequence. Matchers live here,
with the tokens, and not with the workers, which remember no sequence.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from runtime.errors import CapacityError, InvalidRequestError, LockstepError
from runtime.grammar.masks import masks_of
from runtime.grammar.matcher import CompiledGrammar, Matcher
from runtime.scheduling.output import StepOutcome
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import StepPlan
from runtime.scheduling.token_masks import TokenMasks
from runtime.structure import Structure

# A structure takes milliseconds, or is refused within a second.
RETRY_S = 1.0

# Of tokens that came before, so many are replayed on the engine's thread: a few milliseconds.
MAX_AT_ONCE = 2048

OnDone = Callable[[CompiledGrammar | LockstepError], None]
Matchers = Mapping[int, Matcher]  # by choice


class Compiler(Protocol):
    """Makes structures ready, on other threads than the caller's."""

    def compile(self, structure: Structure, on_done: OnDone, is_wanted: Callable[[], bool]) -> None:
        """Never blocks; `on_done` is called once, on any thread.

        `is_wanted` is asked on another thread, before anything is done for it.
        """
        ...

    def run(self, call: Callable[[], None]) -> None:
        """Runs a call on one of these threads."""
        ...


class NoCompiler:
    """Refuses every structure, for a reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def compile(self, structure: Structure, on_done: OnDone, is_wanted: Callable[[], bool]) -> None:
        on_done(InvalidRequestError(f"{structure.kind} isn't possible: {self._reason}"))

    def run(self, call: Callable[[], None]) -> None:
        raise AssertionError("nothing is compiled, so that there is nothing to run")


class StructuredSequences:
    """For one thread. A structure that can't go on ends its own sequence alone."""

    def __init__(self, compiler: Compiler, *, max_compiling: int | None) -> None:
        """Of `max_compiling` requests the structures may be compiled at once; None: of any."""
        self.num_compiling = 0  # less one with each that is done, which its owner counts
        self._compiler = compiler
        self._max_compiling = max_compiling
        self._matchers: dict[int, Matcher] = {}  # by sequence id
        self._failed: list[tuple[int, LockstepError]] = []

    def compile(
        self,
        structure: Structure,
        on_done: OnDone,
        is_wanted: Callable[[], bool],
        *,
        is_limited: bool = True,
    ) -> None:
        """As `Compiler.compile`.

        Raises CapacityError: too many requests wait for that, and this one `is_limited`.
        """
        most = self._max_compiling
        if is_limited and most is not None and self.num_compiling >= most:
            raise CapacityError(
                f"{self.num_compiling} requests wait for a structure to be compiled: "
                f"max_queued_requests={most}; try again in {RETRY_S:g} s",
                retry_after_s=RETRY_S,
            )
        self.num_compiling += 1
        self._compiler.compile(structure, on_done, is_wanted)

    def replay(
        self,
        choices: Mapping[int, Sequence],
        compiled: CompiledGrammar,
        on_done: Callable[[Matchers], None],
    ) -> None:
        """Makes matchers for the choices of a request, which take what there is of their outputs.

        `on_done` is called once they have: at once where that is little, and else on a thread of
        the compiler's.
        """
        matchers = {index: compiled.matcher() for index in choices}
        outputs = {index: _output_of(each) for index, each in choices.items()}

        def follow() -> None:
            for index, matcher in matchers.items():
                matcher.follow(outputs[index])
            on_done(matchers)

        if sum(map(len, outputs.values())) > MAX_AT_ONCE:
            self._compiler.run(follow)
        else:
            follow()

    def start(self, choices: Mapping[int, Sequence], matchers: Matchers) -> None:
        """Follows the choices of a request, by their index, with the matchers of `replay`.

        Raises InvalidRequestError: an output isn't of the structure; some are followed then.
        """
        for index, sequence in choices.items():
            matcher = self._matchers[sequence.sequence_id] = matchers[index]
            matcher.replay(_output_of(sequence)[matcher.num_tokens :])
            if matcher.error is not None:
                raise InvalidRequestError(f"resumed[{index}]: {matcher.error}")

    def forget(self, sequence_id: int) -> None:
        """It has ended; one without a structure is ignored."""
        self._matchers.pop(sequence_id, None)

    def make_masks(self, plan: StepPlan) -> TokenMasks:
        """What the sampled rows of a plan may go on with."""
        sampled = plan.sequence_ids[plan.sample_sequence].tolist()
        found = [(row, self._matchers.get(each)) for row, each in enumerate(sampled)]
        # One that has failed already ends without this step.
        pairs = [(row, each) for row, each in found if each is not None and each.error is None]
        rows, matchers = [row for row, _ in pairs], [each for _, each in pairs]
        masks = masks_of(matchers)
        self._note_errors((sampled[row], each) for row, each in zip(rows, matchers, strict=True))
        return replace(masks, rows=np.array(rows, np.int32))

    def advance(self, outcome: StepOutcome) -> None:
        """Takes what a step brought."""
        if not self._matchers:
            return
        advanced = []
        for sequence, token in zip(outcome.sequences, outcome.token_ids, strict=True):
            matcher = self._matchers.get(sequence.sequence_id)
            if matcher is not None and sequence.finish_reason is None:
                matcher.advance(token)
                advanced.append((sequence.sequence_id, matcher))
        self._note_errors(advanced)
        for sequence in outcome.finished:
            self.forget(sequence.sequence_id)

    def take_failed(self) -> list[tuple[int, LockstepError]]:
        """Sequences that can't go on since the last call, with what to tell their clients."""
        failed, self._failed = self._failed, []
        return failed

    def _note_errors(self, matchers: Iterable[tuple[int, Matcher]]) -> None:
        for sequence_id, matcher in matchers:
            if matcher.error is not None:
                self._failed.append((sequence_id, matcher.error))


def _output_of(sequence: Sequence) -> list[int]:
    return sequence.token_ids[sequence.num_prompt_tokens :].tolist()
