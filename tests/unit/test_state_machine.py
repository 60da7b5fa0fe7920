"""Random lives of random requests: invariants at every step, the oracle's tokens at the end."""

import os
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runtime.errors import CapacityError
from runtime.request import FinishReason, TokenLogprobs
from runtime.scheduling.limits import QueueLimits
from runtime.scheduling.policy import FairPolicy, FcfsPolicy, Policy, PriorityPolicy
from runtime.scheduling.prefix_cache import Hash, sha256_digest
from runtime.scheduling.sequence import Status
from tests.delayed import DelayedOracle
from tests.quick import quick
from tests.scheduling import (
    Chunk,
    OracleExecutor,
    make_scheduler,
    make_sequence,
    make_table,
    oracle_continuation,
    oracle_scores,
)

if TYPE_CHECKING:
    from runtime.scheduling.flatten import BatchTable
    from runtime.scheduling.sequence import Sequence

pytestmark = pytest.mark.unit

EPISODES = 60
FULL_EPISODES = 300
NIGHTLY_EPISODES = 20_000

# A good one, one that sees the last token of a block alone, one that sees nothing.
HASHES: tuple[Hash, ...] = (sha256_digest, lambda data: data[-4:], lambda data: b"")
POLICIES = (
    FcfsPolicy,
    lambda: PriorityPolicy(ageing_s=3.0),
    lambda: FairPolicy(quantum=5),
)
WINDOWS = ((0,), (0,), (0, 0), (0, 3, 6), (5,), (2, 7))
CHUNKS = ((0, Chunk(6)), (0, Chunk(4), Chunk(10)), (Chunk(7),), (3, Chunk(8)))
# Few tokens, so that prompts share beginnings.
PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=20)


class SchedulerMachine(RuleBasedStateMachine):
    """add / fork / schedule / work / update / abort / crash in any order, on pools too small.

    Up to `depth` steps are in flight, and the workers are as late as they like.
    """

    @initialize(
        depth=st.integers(1, 3),
        num_blocks=st.integers(3, 12),
        windows=st.sampled_from(WINDOWS + CHUNKS),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.integers(0, 12),
        watermark=st.sampled_from([0.0, 0.1, 0.5]),
        partial=st.integers(1, 3),
        threshold=st.sampled_from([None, 1, 3]),
        policy=st.sampled_from(POLICIES),
        hash_fn=st.sampled_from(HASHES),
        prefix_cache=st.sampled_from([True, True, True, False]),
        queue=st.sampled_from(
            [
                QueueLimits(),
                QueueLimits(),
                QueueLimits(max_queued_requests=2, max_queued_tokens=20, queue_timeout_s=4.0),
            ]
        ),
        scored_tokens=st.sampled_from([1, 2, 128]),
    )
    def start(
        self,
        depth: int,
        num_blocks: int,
        windows: tuple[int, ...],
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        watermark: float,
        partial: int,
        threshold: int | None,
        policy: type[Policy],
        hash_fn: Hash,
        prefix_cache: bool,
        queue: QueueLimits,
        scored_tokens: int,
    ) -> None:
        self.depth = depth
        self.windows = windows
        budget = max_num_seqs + extra_budget
        self.scheduler = make_scheduler(
            num_blocks=num_blocks * len(windows),
            windows=windows,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=64,
            watermark=watermark,
            max_num_partial_prefills=min(partial, max_num_seqs),
            long_prefill_token_threshold=threshold,
            policy=policy(),
            hash_fn=hash_fn,
            prefix_cache=prefix_cache,
            queue=queue,
            max_num_scored_tokens=scored_tokens,
        )
        self.oracle = OracleExecutor(self.scheduler.cache.layout)
        self.workers = self.make_workers(self.oracle)
        self.table = self.make_table(max_num_seqs=max_num_seqs, num_groups=len(windows))
        self.now = 0.0
        self.sequences: dict[int, Sequence] = {}
        self.ended: set[int] = set()  # aborted, refused, dropped or failed
        self.scores: defaultdict[int, list[TokenLogprobs]] = defaultdict(list)

    def make_workers(self, oracle: OracleExecutor) -> DelayedOracle:
        return DelayedOracle(oracle)

    def make_table(self, **sizes: int) -> "BatchTable":
        return make_table(**sizes)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.sampled_from([1, 3, 8, 20]),
        seed=st.integers(0, 3),
        salt=st.sampled_from(["", "", "a"]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("xyz"),
        patience=st.sampled_from([None, None, None, 2.0, 20.0]),
        scored=st.sampled_from([False, False, False, True]),
        num_forks=st.sampled_from([0, 0, 0, 1, 2]),
        min_tokens=st.sampled_from([0, 0, 3]),
        again=st.booleans(),
        cut=st.sampled_from([None, None, 0, 1, 2, 7]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        seed: int,
        salt: str,
        priority: int,
        tenant: str,
        patience: float | None,
        scored: bool,
        num_forks: int,
        min_tokens: int,
        again: bool,
        cut: int | None,
    ) -> None:
        """With `cut` it is resumed after so many tokens."""
        if again and self.sequences:  # as in a conversation: all that an earlier one has said
            prompt = [*self.sequences[max(self.sequences)].token_ids, *prompt]
        max_tokens = max(max_tokens, min_tokens)
        room = self.scheduler.limits.max_model_len - max_tokens
        prompt = prompt[: max(0, room)]
        if not prompt:
            return
        *output, _ = oracle_continuation(
            prompt, max_tokens=max_tokens, min_tokens=min_tokens, seed=seed, windows=self.windows
        )
        output = output[: cut or 0]
        first = make_sequence(
            len(self.sequences),
            prompt,
            is_resumed=cut is not None,
            output_token_ids=output,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            seed=seed,
            cache_salt=salt,
            priority=priority,
            tenant=tenant,
            deadline_s=None if patience is None else self.now + patience,
            params={"prompt_logprobs": 0} if scored else None,
        )
        if output:
            first.num_scored_tokens = len(prompt) - 1
            if scored:  # told by the engine that had it
                self.scores[first.sequence_id] = oracle_scores(prompt, windows=self.windows)
        self.sequences[first.sequence_id] = first
        for _ in range(0 if output else num_forks):
            fork = first.fork(len(self.sequences), seed=seed + len(self.sequences))
            self.sequences[fork.sequence_id] = fork
        family = {first.sequence_id, *(each.sequence_id for each in first.forks)}
        try:
            self.scheduler.add(first, self.now)
        except CapacityError:
            assert cut is None, "a resumed one was accepted before"
            self.ended |= family

    @precondition(lambda self: len(self.workers) < self.depth)
    @rule(seconds=st.sampled_from([0.0, 1.0, 1.0, 5.0]))
    def schedule(self, seconds: float) -> None:
        self.now += seconds
        had_work = self.scheduler.has_work
        output = self.scheduler.schedule(self.now)
        dropped = self.drop()
        if output is None:
            assert dropped or not had_work or len(self.workers), "work waits, nothing runs"
            return
        budget = self.scheduler.limits.max_num_batched_tokens
        assert 0 < output.num_scheduled_tokens <= budget
        for each in output.scheduled:
            assert 0 < each.num_scheduled_tokens <= self.scheduler.limits.max_chunk_tokens
        sampled = {each.sequence_id for each in output.steady}
        sampled |= {each.sequence.sequence_id for each in output.scheduled if each.samples}
        steady = {each.sequence_id for each in self.scheduler.running.steady.members}
        assert steady <= sampled, "somebody steady was left out"
        self.workers.submit(self.table.flatten(output))

    def drop(self) -> int:
        dropped = self.scheduler.take_dropped()
        for sequence, _ in dropped:
            assert sequence.finish_reason is FinishReason.ABORT
            self.ended.add(sequence.sequence_id)
            self.ended |= {
                each.sequence_id
                for each in self.sequences.values()
                if each.fork_of is sequence and each.status is Status.FINISHED
            }
        return len(dropped)

    @precondition(lambda self: len(self.workers))
    @rule(num_steps=st.integers(1, 3))
    def work(self, num_steps: int) -> None:
        self.workers.work(num_steps)

    @precondition(lambda self: len(self.workers))
    @rule(seconds=st.sampled_from([0.0, 1.0]))
    def update(self, seconds: float) -> None:
        self.now += seconds
        outcome = self.scheduler.update(self.workers.result(), self.now)
        assert not self.ended & {each.sequence_id for each in outcome.sequences}
        assert all(each.finish_reason is not None for each in outcome.finished)
        failed = {sequence.sequence_id for sequence, _ in outcome.failed}
        assert failed <= self.oracle.faulty - self.ended
        self.ended |= failed
        for sequence_id, scores in outcome.scores.items():
            self.scores[sequence_id] += scores

    @rule(count=st.integers(2, 8))
    def run(self, count: int) -> None:
        for _ in range(count):
            while len(self.workers) < self.depth:
                before = len(self.workers)
                self.schedule(0.0)
                if len(self.workers) == before:
                    break
            if len(self.workers):
                self.update(0.0)
            self.scheduler.check_invariants()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.sequences)))
        if self.sequences[sequence_id].finish_reason is None:
            self.ended.add(sequence_id)
        self.scheduler.abort(sequence_id)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        """Its next token can't be sampled."""
        self.oracle.faulty.add(data.draw(st.sampled_from(sorted(self.sequences))))

    @rule(is_outside=st.booleans())
    def crash(self, is_outside: bool) -> None:
        self.scheduler.restart(is_outside=is_outside)
        self.drop()
        self.workers.restart()

    @rule(seconds=st.sampled_from([0.0, 5.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.expire(self.now)
        self.drop()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if not self.scheduler.has_work:
                break
            self.run(1)
        assert not self.scheduler.has_work, "no progress"
        for sequence in self.sequences.values():
            self.check_tokens(sequence)

    def check_tokens(self, sequence: "Sequence") -> None:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens].tolist()
        output = sequence.token_ids[sequence.num_prompt_tokens :].tolist()
        wanted = oracle_continuation(
            prompt,
            max_tokens=sequence.max_num_tokens - len(prompt),
            min_tokens=sequence.params.min_tokens,
            seed=sequence.seed,
            windows=self.windows,
        )
        if sequence.sequence_id in self.ended:
            wanted = wanted[: len(output)]
        else:
            assert sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert output == wanted
        is_scored = sequence.params.prompt_logprobs is not None and sequence.fork_of is None
        wanted_scores = oracle_scores(prompt, windows=self.windows) if is_scored else []
        scores = self.scores[sequence.sequence_id]
        if sequence.sequence_id in self.ended:
            wanted_scores = wanted_scores[: len(scores)]
        assert scores == wanted_scores


def run(episodes: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(max_examples=episodes, stateful_step_count=25, deadline=None),
    )


@pytest.mark.parametrize("episodes", quick([EPISODES, FULL_EPISODES], EPISODES))
def test_state_machine(episodes: int) -> None:
    run(episodes)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_state_machine_through_the_night() -> None:
    run(int(os.environ.get("LOCKSTEP_EPISODES", NIGHTLY_EPISODES)))
