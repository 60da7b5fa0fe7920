"""The engine on tiny models in this process, stepped by the test.

All between client and model is real but the transport: what would travel is encoded and decoded.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from runtime.cluster.loaded_model import loaded_model
from runtime.config import EngineConfig
from runtime.driver import make_scheduler, plan_cache, resolve_max_model_len
from runtime.engine import Engine
from runtime.grammar.compiler import GrammarCompiler
from runtime.request import (
    FinishReason,
    ModelInfo,
    Request,
    RequestFailure,
    RequestOutput,
    ResumedChoice,
    TokenLogprobs,
)
from runtime.sampling_params import SamplingParams
from runtime.structured import Compiler, NoCompiler, OnDone
from tests.local_ranks import CodedExecutor, Rank
from tests.served import DEPTH
from workers.codec import encode_spec
from workers.config import CacheLayout

if TYPE_CHECKING:
    from runtime.errors import LockstepError

BLOCK_SIZE = 4
STEP_S = 0.01
MAX_STEPS = 10_000
COMPILE_TIMEOUT_S = 30
LOGPROB_BOUND = 1e-4


class WaitingCompiler:
    """The real compiler, waited for: the test's steps don't depend on its speed."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler

    def compile(self, structure: object, on_done: OnDone, is_wanted: object) -> None:
        outcomes: SimpleQueue = SimpleQueue()
        self._compiler.compile(structure, outcomes.put)
        on_done(outcomes.get(timeout=COMPILE_TIMEOUT_S))

    def run(self, call: Callable[[], None]) -> None:
        call()


@dataclass
class Answer:
    """What one choice got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a client wants."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    resumed: tuple[ResumedChoice, ...] = ()

    def with_seed(self, seed: int) -> "Ask":
        return replace(self, seed=seed)


class TinyEngine:
    """An engine that isn't started. Its requests count from 0."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        num_blocks: int | None = None,
        compiler: Compiler | None = None,
        preempt_every: int = 0,
        **options: object,
    ) -> None:
        """`num_blocks` of the pool, plenty where unset; `options` are EngineConfig's.

        After each `preempt_every` steps the one that has run longest gives way.
        """
        self._now = 0.0
        self._preempt_every = preempt_every
        spec = loaded_model([encode_spec(rank.executor.spec) for rank in ranks])
        multiple = spec.block_size_multiple
        block_size = -(-BLOCK_SIZE // multiple) * multiple
        defaults = {"block_size": block_size, "max_num_batched_tokens": 32, "max_num_seqs": 12}
        config = EngineConfig(**defaults | {"kv_memory": 1 << 24} | options)
        layout = plan_cache(config, spec)
        if num_blocks is not None:
            config = replace(config, kv_memory=num_blocks * layout.block_bytes)
            layout = plan_cache(config, spec)
            assert layout.num_blocks == num_blocks
        groups = tuple(group.layers for group in layout.groups)
        self.executor = CodedExecutor(
            ranks,
            CacheLayout(block_size=block_size, num_blocks=layout.num_blocks, groups=groups),
        )
        model = ModelInfo(
            name="tiny",
            path="",
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            max_model_len=resolve_max_model_len(config, spec, layout),
            eos_token_ids=spec.eos_token_ids,
            tp_size=len(ranks),
        )
        self.scheduler = make_scheduler(config, layout, model)
        self.engine = Engine(
            model=model,
            scheduler=self.scheduler,
            executor=self.executor,
            compiler=compiler or NoCompiler("the test has no tokenizer"),
            depth=DEPTH,
            clock=lambda: self._now,
        )
        self.answers: defaultdict[tuple[int, int], Answer] = defaultdict(Answer)
        self.failures: dict[int, LockstepError] = {}
        self.preempted: list[tuple[int, int]] = []  # request, and the output tokens that it had
        self._owners: list[int] = []  # of sequences, in the order of their ids
        self._num_requests = 0
        self._connection = self.engine.connect(self._take)
        self._watch_preemptions()

    def add(self, ask: Ask) -> int:
        request_id = self._num_requests
        self._num_requests += 1
        self._owners += [request_id] * (
            sum(not each.has_ended for each in ask.resumed) if ask.resumed else ask.params.n
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=ask.prompt,
            params=self.engine.model.complete(ask.params, num_prompt_tokens=len(ask.prompt)),
            seed=ask.seed,
            bad_words=ask.bad_words,
            resumed=ask.resumed,
        )
        self.engine.add(self._connection, request, arrived_s=self._now)
        self.engine.run_submitted()
        return request_id

    def run(self, *asks: Ask) -> list[list[Answer]]:
        """Adds requests and steps until all have ended; the answers of each, choice by choice."""
        ids = [self.add(ask) for ask in asks]
        while self.engine.has_work:
            self.step()
            assert len(self.executor.plans) < MAX_STEPS, "no progress"
        return [
            [self.answers[request_id, choice] for choice in range(ask.params.n)]
            for request_id, ask in zip(ids, asks, strict=True)
        ]

    def step(self) -> None:
        self.engine.step()
        self._now += STEP_S
        if self._preempt_every and len(self.executor.plans) % self._preempt_every == 0:
            for sequence in [*self.scheduler.running.sequences.values()][:1]:
                self.scheduler.running.preempt(sequence)
        self.scheduler.check_invariants()

    def preempt(self, request_id: int) -> None:
        """Those of a request's choices that run give way."""
        for sequence in [*self.scheduler.running.sequences.values()]:
            if self.owner(sequence.sequence_id) == request_id:
                self.scheduler.running.preempt(sequence)

    def owner(self, sequence_id: int) -> int:
        """The request that a sequence is of."""
        return self._owners[sequence_id - 1]

    @property
    def most_together(self) -> int:
        """Sequences in the largest step."""
        return max(len(plan.sequence_ids) for plan in self.executor.plans)

    def _watch_preemptions(self) -> None:
        preempt = self.scheduler.running.preempt

        def watched(sequence) -> None:
            self.preempted.append((self.owner(sequence.sequence_id), sequence.num_output_tokens))
            preempt(sequence)

        self.scheduler.running.preempt = watched

    def _take(self, outputs: list[RequestOutput | RequestFailure]) -> None:
        for output in outputs:
            if isinstance(output, RequestFailure):
                assert output.request_id not in self.failures
                self.failures[output.request_id] = output.error
                continue
            answer = self.answers[output.request_id, output.choice]
            assert answer.finish_reason is None, "something came after the end"
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs
            answer.scores += output.scores
            answer.finish_reason = output.finish_reason
            answer.num_cached_tokens = max(answer.num_cached_tokens, output.num_cached_tokens)


def check_equal(found: Sequence[Answer], wanted: Sequence[Answer]) -> None:
    """Token for token; logprobs within LOGPROB_BOUND, the most probable tokens the same."""
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        check_logprobs(mine.logprobs, theirs.logprobs)
        check_logprobs(mine.scores, theirs.scores)


def check_logprobs(
    found: Sequence[TokenLogprobs], wanted: Sequence[TokenLogprobs], bound: float = LOGPROB_BOUND
) -> None:
    assert [each.top_token_ids for each in found] == [each.top_token_ids for each in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        difference = np.subtract(
            [mine.logprob, *mine.top_logprobs], [theirs.logprob, *theirs.top_logprobs]
        )
        assert np.abs(difference).max() < bound
