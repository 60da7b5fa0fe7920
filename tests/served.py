"""Engines over the oracle: stepped by hand, or started and served to clients of the public API."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from runtime.engine import Engine
from runtime.engine_service import EngineServer
from runtime.request import ModelInfo, Request, RequestFailure, RequestOutput, TokenLogprobs
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks
from runtime.structured import Compiler, NoCompiler
from tests.frontend import Client, RunningFrontend
from tests.params import complete_params
from tests.scheduling import EOS, VOCAB_SIZE, OracleExecutor, make_scheduler

if TYPE_CHECKING:
    from runtime.connection import Connection
    from runtime.errors import LockstepError

MAX_STEPS = 2000
# Of engines that are started.
DEPTH = int(os.environ.get("LOCKSTEP_TEST_DEPTH", "2"))
FIRST_CHAR = 0x4E00
UNHURRIED_STEP_S = 0.005


class ScoringOracle(OracleExecutor):
    """Tells logprobs of what it samples, which depend on the token alone."""

    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        result = super().execute(plan, masks)
        for row, index in enumerate(plan.sample_sequence):
            count = int(plan.sampling.num_logprobs[index])
            if count >= 0:
                result.logprobs[row] = logprobs_of(result.token_ids[row], count)
        return result


class UnhurriedOracle(ScoringOracle):
    """Takes as long for a step as a small model does: what is to be cut short isn't over before."""

    def execute(self, plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
        time.sleep(UNHURRIED_STEP_S)
        return super().execute(plan, masks)


def logprobs_of(token: int, count: int) -> TokenLogprobs:
    """What ScoringOracle tells of a token."""
    tops = tuple((token + place) % VOCAB_SIZE for place in range(count))
    return TokenLogprobs(-token / 8, tops, tuple(-token / 8 - place for place in range(count)))


def oracle_model(scheduler: Scheduler, *, path: str = "", **changes: Any) -> ModelInfo:
    fields = {
        "name": "oracle",
        "path": path,
        "architecture": "Oracle",
        "vocab_size": VOCAB_SIZE,
        "max_model_len": scheduler.limits.max_model_len,
        "eos_token_ids": (EOS,),
        "tp_size": 1,
    }
    return ModelInfo(**(fields | changes))


def make_engine(
    executor_class: type[OracleExecutor] = ScoringOracle,
    *,
    path: str = "",
    compiler: Compiler | None = None,
    model: dict[str, Any] | None = None,
    clock: Callable[[], float] | None = None,
    depth: int = DEPTH,
    **scheduler_options: Any,
) -> tuple[Engine, OracleExecutor]:
    """`model` has changes of ModelInfo."""
    scheduler = make_scheduler(**scheduler_options)
    executor = executor_class(scheduler.cache.layout)
    engine = Engine(
        model=oracle_model(scheduler, path=path, **(model or {})),
        scheduler=scheduler,
        compiler=compiler or NoCompiler("a test has no tokenizer"),
        executor=executor,
        depth=depth,
        **({} if clock is None else {"clock": clock}),
    )
    return engine, executor


class Served:
    """An engine that isn't started: the test makes its steps, and time passes as it says."""

    def __init__(
        self,
        executor_class: type[OracleExecutor] = ScoringOracle,
        *,
        step_s: float = 1.0,
        depth: int = 1,
        **options: Any,
    ) -> None:
        self.now = 100.0
        self.engine, self.executor = make_engine(
            executor_class, clock=lambda: self.now, depth=depth, **options
        )
        self.scheduler: Scheduler = self.engine._scheduler
        execute = self.executor.execute

        def slow_execute(plan: StepPlan, masks: TokenMasks | None = None) -> StepResult:
            self.now += step_s
            return execute(plan, masks)

        self.executor.execute = slow_execute
        self.tokens: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.logprobs: defaultdict[tuple[int, int], list[TokenLogprobs]] = defaultdict(list)
        self.scores: defaultdict[tuple[int, int], list[TokenLogprobs]] = defaultdict(list)
        self.ends: dict[tuple[int, int], RequestOutput] = {}
        self.failures: dict[int, LockstepError] = {}
        self.connection: Connection = self.engine.connect(self._sink)

    def add(
        self,
        request_id: int,
        prompt: list[int],
        *,
        max_tokens: int = 4,
        n: int = 1,
        ignore_eos: bool = False,
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """`params` are further sampling parameters, `fields` are of the request."""
        sampling = complete_params(
            max_tokens=max_tokens, n=n, ignore_eos=ignore_eos, **(params or {})
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=sampling,
            seed=request_id,
            **fields,
        )
        self.engine.add(self.connection, request, arrived_s=self.now)

    def abort(self, request_id: int, choice: int | None = None) -> None:
        self.engine.abort(self.connection, request_id, choice)

    def drain(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                self.scheduler.check_invariants()
                return
            self.engine.step()
        raise AssertionError("no progress")

    def _sink(self, outputs: list[RequestOutput | RequestFailure]) -> None:
        for output in outputs:
            if isinstance(output, RequestFailure):
                assert output.request_id not in self.failures
                self.failures[output.request_id] = output.error
                continue
            key = (output.request_id, output.choice)
            assert key not in self.ends, "something came after the end"
            self.tokens[key].extend(output.token_ids)
            self.logprobs[key].extend(output.logprobs)
            self.scores[key].extend(output.scores)
            if output.finish_reason is not None:
                self.ends[key] = output


@contextmanager
def serving(engine: Any, **frontend_options: Any) -> Iterator[Client]:
    """A client of an engine's frontend; the engine is started and ended by the caller."""
    server = EngineServer(engine, "engine-token")
    server.start()
    try:
        with (
            RunningFrontend(server, **frontend_options) as frontend,
            grpc.insecure_channel(frontend.address) as channel,
        ):
            yield Client(channel)
    finally:
        server.stop(grace_s=5)


def write_characters(folder: Path) -> Path:
    """A tokenizer with a character for each of the oracle's tokens; returns the folder."""
    vocab = {char_of(token): token for token in range(VOCAB_SIZE)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=char_of(EOS)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"] == vocab
    return folder


def char_of(token: int) -> str:
    return chr(FIRST_CHAR + token)


def text_of(tokens: list[int]) -> str:
    return "".join(map(char_of, tokens))
