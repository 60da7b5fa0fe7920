"""Structured output in an engine: ranks that sample whatever the masks allow, at random."""

import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from runtime.engine import Engine
from runtime.frontend.text import Tokenizer
from runtime.grammar.compiler import GrammarCompiler
from runtime.grammar.limits import GrammarLimits
from runtime.request import FinishReason, Request, RequestFailure, RequestOutput
from runtime.scheduling.cache_layout import CacheLayout
from runtime.scheduling.step_plan import Fault, StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks
from runtime.structure import Structure
from runtime.structured import OnDone
from tests.frontend import make_byte_fallback_tokenizer
from tests.masks import allowed_by
from tests.params import complete_params
from tests.scheduling import EOS, VOCAB_SIZE, OracleExecutor
from tests.served import make_engine
from tests.structures import SCHEMAS

if TYPE_CHECKING:
    from runtime.errors import LockstepError

TIMEOUT_S = 30
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LINES = [json.dumps(schema, ensure_ascii=False) for schema in SCHEMAS[:20]]
TOKENIZER = Tokenizer(make_byte_fallback_tokenizer(LINES))  # its <s> is the oracle's EOS
CLOSING = tuple('"]})')
MAX_TOKENS = 160


def write_tokenizer(folder: Path) -> Path:
    make_byte_fallback_tokenizer(LINES).save(str(folder / "tokenizer.json"))
    return folder


class RandomExecutor(OracleExecutor):
    """Samples any token that a row's mask allows, and the oracle's where there is none.

    Which one is a function of seed, position and mask, as with our sampler. Like a rank it knows
    no structures: it asks for masks where the plan says that they come.
    """

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__(layout)
        self.disobedient: set[int] = set()  # sequence ids that get what isn't allowed
        self.ends_soon = True
        self.num_empty = 0
        self.num_masked: list[int] = []  # rows with a mask, of each step

    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        result = super().execute(plan, masks)
        if not plan.defer_sampling:
            return result
        assert masks is not None
        assert masks.rows.tolist() == sorted(masks.rows.tolist())
        self.num_masked.append(len(masks.rows))
        for row, allowed in allowed_by(masks, VOCAB_SIZE).items():
            if not allowed:
                result.faults[row] = Fault.EMPTY_SUPPORT
                self.num_empty += 1
                continue
            if result.sequence_ids[row] in self.disobedient:
                allowed = {*range(VOCAB_SIZE)} - allowed
            index = plan.sample_sequence[row]
            place = f"{plan.sampling.seed[index]} {plan.positions[plan.sample_index[row]]}"
            result.token_ids[row] = self._pick(sorted(allowed), random.Random(place))
        return result

    def _pick(self, allowed: list[int], draw: random.Random) -> int:
        """One of them: often one that closes something, or else no end where there is a choice."""
        closing = [i for i in allowed if i == EOS or TOKENIZER.decode([i]).startswith(CLOSING)]
        if not self.ends_soon:
            return draw.choice([i for i in allowed if i != EOS] or allowed)
        return draw.choice(closing if closing and draw.random() < 0.4 else allowed)


class HeldCompiler:
    """Compiles once the test lets it."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._held: SimpleQueue[tuple[Structure, OnDone]] = SimpleQueue()

    def compile(self, structure: Structure, on_done: OnDone, is_wanted: Callable[[], bool]) -> None:
        self._held.put((structure, on_done, is_wanted))

    def run(self, call: Callable[[], None]) -> None:
        self._compiler.run(call)

    def release(self) -> None:
        """Waits for a structure, and has it compiled."""
        self._compiler.compile(*self._held.get(timeout=TIMEOUT_S))


class Client:
    """Collects what its connection brings."""

    def __init__(self, engine: Engine) -> None:
        self.tokens: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.reasons: dict[tuple[int, int], FinishReason] = {}
        self.failures: dict[int, LockstepError] = {}
        self._ended: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self.connection = engine.connect(self._sink)

    def add(
        self,
        request_id: int,
        *,
        max_tokens: int = MAX_TOKENS,
        timeout_s: float | None = None,
        **params: Any,
    ) -> None:
        sampling = complete_params(max_tokens=max_tokens, **params)
        self.connection.add(
            Request(
                request_id=request_id,
                prompt_token_ids=PROMPT,
                params=sampling,
                seed=request_id,
                timeout_s=timeout_s,
            )
        )

    def wait(self, count: int = 1) -> None:
        """Until so many more choices have ended, or requests failed."""
        for _ in range(count):
            self._ended.get(timeout=TIMEOUT_S)

    def text(self, request_id: int, choice: int = 0) -> str:
        """Of an output that has ended by itself."""
        key = (request_id, choice)
        assert self.reasons[key] is FinishReason.STOP, self.tokens[key]
        *tokens, last = self.tokens[key]
        assert last == EOS
        return TOKENIZER.decode(tokens)

    def _sink(self, outputs: list[RequestOutput | RequestFailure]) -> None:
        for output in outputs:
            if isinstance(output, RequestFailure):
                assert output.request_id not in self.failures
                self.failures[output.request_id] = output.error
                self._ended.put((output.request_id, -1))
                continue
            key = (output.request_id, output.choice)
            assert key not in self.reasons, "something came after the end"
            self.tokens[key].extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason
                self._ended.put(key)


def make_compiler(folder: Path, **limits: Any) -> GrammarCompiler:
    return GrammarCompiler(
        str(folder), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], limits=GrammarLimits(**limits)
    )


class Running:
    """A started engine whose ranks sample at random, and a client of it."""

    def __init__(self, compiler: Any, **options: Any) -> None:
        self.engine: Engine
        self.ranks: RandomExecutor
        self.engine, self.ranks = make_engine(RandomExecutor, compiler=compiler, **options)
        self.engine.start()
        self.client = Client(self.engine)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        self.engine._scheduler.check_invariants()

    def settle(self) -> None:
        """Until the engine has read all that was sent to it, and the steps in flight have run."""
        self.client.add(99, max_tokens=1)
        self.client.wait()
