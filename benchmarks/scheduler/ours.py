"""Runs the cases on our scheduler: schedule, flatten and update, as the engine calls them."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np

from benchmarks.scheduler.cases import (
    NUM_WINDOW_GROUPS,
    STEP_TOKENS,
    VOCAB_SIZE,
    WINDOW,
    AdmitCase,
    DecodeCase,
)
from benchmarks.scheduler.timing import (
    Measurement,
    Stopwatch,
    collector_watched,
    frozen_heap,
    full_collection_us,
)
from runtime.sampling_params import LOCKSTEP_DEFAULTS, CompleteParams, SamplingParams
from runtime.scheduling.cache_layout import CacheLayout, LayerCacheSpec, make_cache_layout
from runtime.scheduling.cache_manager import CacheManager
from runtime.scheduling.flatten import BatchTable
from runtime.scheduling.limits import SchedulerLimits
from runtime.scheduling.policy import FcfsPolicy
from runtime.scheduling.prefix_cache import PrefixCache
from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.sequence import Sequence as SchedulerSequence
from runtime.scheduling.step_plan import StepPlan, StepResult

MAX_MODEL_LEN = 16_384
WATERMARK = 0.01  # the product's default
MAX_NUM_SEQS = 1024  # bounds the pool, which the cases size themselves
MAX_TOKENS = 8000  # none of the sequences ends while it is measured
ROOT = bytes(32)
HASHED_TOKENS = 8192
TOKEN = 7


class Driver:
    """A scheduler and its batch table, stepped with tokens that cost nothing."""

    def __init__(
        self, layout: CacheLayout, *, prefix_cache: bool, max_num_seqs: int, step_tokens: int
    ) -> None:
        self.scheduler = Scheduler(
            CacheManager(layout, prefix_cache=prefix_cache, root=ROOT),
            policy=FcfsPolicy(),
            limits=SchedulerLimits(
                max_num_batched_tokens=step_tokens,
                max_chunk_tokens=step_tokens,
                max_num_seqs=max_num_seqs,
                max_model_len=MAX_MODEL_LEN,
                watermark=WATERMARK,
            ),
            eos_token_ids=frozenset(),
        )
        self.table = BatchTable(
            max_num_seqs=max_num_seqs, num_groups=len(layout.groups), vocab_size=VOCAB_SIZE
        )
        self.watch = Stopwatch()

    def step(self) -> None:
        self.watch.start_step()
        self.run()
        self.watch.end_step()

    def run(self) -> None:
        """One step, whose time has begun. Its result is made between the timed parts."""
        watch = self.watch
        # An attribute that is bound again frees what it held: that belongs to the time of a step.
        self.output = self.scheduler.schedule(0.0)
        watch.mark("schedule")
        assert self.output is not None, "nothing to run"
        self.plan = self.table.flatten(self.output)
        watch.mark("flatten")
        result = make_result(self.plan)
        watch.start()
        self.outcome = self.scheduler.update(result, 0.0)
        watch.mark("update")


class Decoding:
    """A driver in which all sequences that have a seat feed one token a step."""

    def __init__(self, case: DecodeCase) -> None:
        self._case = case
        self.driver = Driver(
            make_layout(case),
            prefix_cache=case.prefix_cache,
            max_num_seqs=case.running,
            step_tokens=max(STEP_TOKENS, case.running),
        )

    def fill(self) -> None:
        """Adds the sequences and computes the prompts of those that run."""
        case, scheduler = self._case, self.driver.scheduler
        generator = np.random.default_rng(0)
        for index in range(case.running + case.waiting):
            prompt = make_prompt(generator, case.context + index % case.block_size)
            scheduler.add(make_sequence(index, prompt), 0.0)
        self.driver.step()
        while not self.all_decode:
            self.driver.step()
        for _ in range(case.num_warm_up_steps):
            self.driver.step()
        self.driver.watch = Stopwatch()

    @property
    def all_decode(self) -> bool:
        """Whether every seat is taken, and the last step fed each of them one token."""
        running = len(self.driver.scheduler.running)
        return running == self._case.running == len(self.driver.plan.input_ids)

    def check(self) -> None:
        """Asserts that what was timed is what the case says."""
        assert self.all_decode, f"a sequence has ended, or was preempted: {self._case}"
        num_waiting = len(self.driver.scheduler.waiting)
        assert num_waiting == self._case.waiting, f"num_waiting={num_waiting}: {self._case}"


def measure_decode(cases: Sequence[DecodeCase]) -> list[Measurement]:
    """Runs cases side by side, step by step in turns, so that they see the same machine.

    The heap is frozen when the schedulers are there and the sequences aren't yet: as in the
    engine, which freezes it once it has started.
    """
    sides = [Decoding(case) for case in cases]
    with frozen_heap():
        for side in sides:
            side.fill()
        with collector_watched() as pauses:
            for index in range(cases[0].num_steps):
                for side in sides if index % 2 == 0 else reversed(sides):
                    side.driver.step()
        full_gc_us = full_collection_us()
    for side in sides:
        side.check()
    watches = [side.driver.watch for side in sides]
    return [
        Measurement(dict(each.phases), list(pauses), full_gc_us, each.disturbed) for each in watches
    ]


def measure_admit(case: AdmitCase) -> Measurement:
    generator = np.random.default_rng(0)
    driver = Driver(
        make_layout(case),
        prefix_cache=case.hits != "off",
        max_num_seqs=case.num_prompts,
        step_tokens=case.num_prompts * case.prompt_len,
    )
    known = [make_prompt(generator, case.prompt_len) for _ in range(case.num_prompts)]
    numbers = count()
    with frozen_heap(), collector_watched() as pauses:
        for index in range(case.num_warm_up_rounds + case.num_rounds):
            if index == case.num_warm_up_rounds:
                driver.watch = Stopwatch()
                pauses.clear()
            prompts = known
            if case.hits != "all":
                prompts = [make_prompt(generator, case.prompt_len) for _ in range(case.num_prompts)]
            admit(driver, zip(numbers, prompts, strict=False))
            check_admitted(driver.plan, case, hits=case.hits == "all" and index > 0)
            sequence_ids = driver.plan.sequence_ids.tolist()
            driver.watch.start()
            for sequence_id in sequence_ids:
                driver.scheduler.abort(sequence_id)
            driver.watch.mark("finish")
            driver.watch.end_step()
    watch = driver.watch
    return Measurement(dict(watch.phases), list(pauses), disturbed=watch.disturbed)


def admit(driver: Driver, prompts: Iterable[tuple[int, "array[int]"]]) -> None:
    """Begins a round: makes the sequences, adds them, runs their first step."""
    prompts = list(prompts)
    params = [make_params() for _ in prompts]
    driver.watch.start_step()
    sequences = [
        SchedulerSequence(sequence_id, prompt, params=each, seed=sequence_id)
        for (sequence_id, prompt), each in zip(prompts, params, strict=True)
    ]
    driver.watch.mark("build")
    for sequence in sequences:
        driver.scheduler.add(sequence, 0.0)
    driver.watch.mark("add")
    driver.run()


def check_admitted(plan: StepPlan, case: AdmitCase, *, hits: bool) -> None:
    """Asserts that all prompts ran, and that the prefix cache knew what the case says."""
    # The last token of a prompt is always computed.
    known = (case.prompt_len - 1) // case.block_size * case.block_size if hits else 0
    fed = [case.prompt_len - known] * case.num_prompts
    assert plan.query_lens.tolist() == fed, f"fed {plan.query_lens.tolist()}, not {fed}"


def measure_hashing(block_size: int, *, num_tokens: int, num_rounds: int) -> list[float]:
    """Time per token, in ns, of the hashes of a prompt's full blocks."""
    layout = make_layout(AdmitCase(hits="none", block_size=block_size))
    cache = PrefixCache(layout, root=ROOT)
    generator = np.random.default_rng(0)
    watch = Stopwatch()
    for _ in range(num_rounds):
        prompt = make_prompt(generator, num_tokens)
        watch.start()
        cache.hash_blocks([], prompt, num_tokens // block_size, "")
        watch.mark("hash")
    return [us * 1e3 / num_tokens for us in watch.phases["hash"]]


def make_layout(case: DecodeCase | AdmitCase) -> CacheLayout:
    """One group of full attention; with the window groups of Gemma 3 where the case says so."""
    hybrid = isinstance(case, DecodeCase) and case.hybrid
    windows = [0] + [WINDOW] * (NUM_WINDOW_GROUPS * hybrid)
    specs = [
        LayerCacheSpec(window=window, num_kv_heads=1, k_dim=1, v_dim=1, element_bytes=1)
        for window in windows
    ]
    return make_cache_layout(
        specs,
        block_size=case.block_size,
        memory_bytes=case.num_blocks * case.block_size * specs[0].token_bytes,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        max_chunk_tokens=STEP_TOKENS,
    )


def make_prompt(generator: np.random.Generator, length: int) -> "array[int]":
    """An array, as the engine gets it from a frontend."""
    return array("i", generator.integers(VOCAB_SIZE, size=length, dtype=np.int32).tobytes())


def make_params() -> CompleteParams:
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0).complete(LOCKSTEP_DEFAULTS)


def make_sequence(sequence_id: int, prompt: "array[int]") -> SchedulerSequence:
    return SchedulerSequence(sequence_id, prompt, params=make_params(), seed=sequence_id)


def make_result(plan: StepPlan) -> StepResult:
    """The same token for every row that is sampled."""
    sequence_ids = plan.sequence_ids[plan.sample_sequence].tolist()
    return StepResult(
        step_id=plan.step_id, sequence_ids=sequence_ids, token_ids=[TOKEN] * len(sequence_ids)
    )
