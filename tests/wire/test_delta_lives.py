"""Random lives of random requests: each step as a delta is what it is as a whole."""

import os
import random
from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.delta_workers import DeltaReader, DeltaWorkers, limits_of_layout
from tests.quick import quick
from tests.scheduling import Chunk, OracleExecutor, make_scheduler, make_sequence, make_table
from tests.steps import finish
from tests.unit.test_state_machine import SchedulerMachine

if TYPE_CHECKING:
    from runtime.scheduling.flatten import BatchTable
    from runtime.scheduling.output import SchedulerOutput

pytestmark = pytest.mark.wire

EPISODES = 40
NIGHTLY_EPISODES = 5_000
MOST_BYTES = 2048  # of a steady step of 256 sequences


class DeltaMachine(SchedulerMachine):
    """add / fork / schedule / work / update / abort / crash, every step through the codecs."""

    def make_workers(self, oracle: OracleExecutor) -> DeltaWorkers:
        return DeltaWorkers(oracle, max_model_len=64)

    def make_table(self, **sizes: int) -> "BatchTable":
        return make_table(**sizes, keyframe_interval=5)


def run(episodes: int) -> None:
    run_state_machine_as_test(
        DeltaMachine,
        settings=settings(max_examples=episodes, stateful_step_count=25, deadline=None),
    )


def test_deltas_of_random_lives_say_what_whole_plans_do() -> None:
    run(EPISODES)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_deltas_of_random_lives_through_the_night() -> None:
    run(int(os.environ.get("LOCKSTEP_EPISODES", NIGHTLY_EPISODES)))


@pytest.mark.parametrize(
    ("windows", "depth"),
    quick(
        product([(0,), (0, 5), (Chunk(6), 3)], [1, 2, 3]),
        *(((0,), 1), ((0, 5), 2), ((Chunk(6), 3), 3)),
    ),
    ids=str,
)
def test_deltas_of_a_busy_engine_say_what_whole_plans_do(
    depth: int, windows: tuple[int, ...]
) -> None:
    """A pool that is too small, forks, aborts, and a restart in the middle."""
    source = random.Random(depth)
    scheduler = make_scheduler(
        num_blocks=24 * len(windows),
        block_size=2,
        windows=windows,
        max_num_batched_tokens=12,
        max_num_seqs=6,
    )
    table = make_table(max_num_seqs=6, num_groups=len(windows), keyframe_interval=17)
    limits = limits_of_layout(scheduler.cache.layout, max_model_len=64)
    reader = DeltaReader(limits)
    in_flight: list[SchedulerOutput] = []
    num_steps = num_steady = 0
    for number in range(0, 160, 2):
        prompt = [source.randrange(1, 4) for _ in range(source.randrange(1, 12))]
        sequence = make_sequence(number, prompt, max_tokens=source.randrange(1, 30))
        if number % 10 == 0:
            sequence.fork(number + 1, seed=1)
        scheduler.add(sequence)
        if source.random() < 0.2:
            scheduler.abort(source.randrange(number + 1))
        if number == 80:
            scheduler.restart()
            reader, in_flight = DeltaReader(limits), []
        for _ in range(4):
            while len(in_flight) < depth and (output := scheduler.schedule()) is not None:
                reader.take(table.flatten(output))
                in_flight.append(output)
                num_steps += 1
                num_steady += len(output.steady)
            finish(scheduler, in_flight.pop(0))
    assert num_steps > 300
    assert num_steady > num_steps
    assert scheduler.running.num_preemptions > 5 or 0 not in windows  # windows need little


@pytest.mark.parametrize("prompt_lens", [range(1, 33), (7,)], ids=["apart", "together"])
def test_a_steady_step_of_256_sequences_is_small(prompt_lens: range | tuple[int, ...]) -> None:
    """At depth 2, also where all of them need a block in one step."""
    scheduler = make_scheduler(
        num_blocks=256 * 8,
        block_size=16,
        max_num_batched_tokens=16384,
        max_num_seqs=256,
        max_num_partial_prefills=256,
    )
    table = make_table(max_num_seqs=256, num_groups=1)
    reader = DeltaReader(limits_of_layout(scheduler.cache.layout, max_model_len=128))
    for number in range(256):
        prompt = [1 + number] * prompt_lens[number % len(prompt_lens)]
        scheduler.add(make_sequence(number, prompt, max_tokens=64, ignore_eos=True))
    steady_sizes = []
    in_flight = []
    for _ in range(60):
        while len(in_flight) < 2:
            output = scheduler.schedule()
            reader.take(table.flatten(output))
            in_flight.append(output)
            if len(output.steady) == 256 and not output.scheduled:
                steady_sizes.append(reader.sizes[-1])
        finish(scheduler, in_flight.pop(0))
    assert len(steady_sizes) > 40
    assert max(steady_sizes[1:]) < MOST_BYTES  # in the first of them all become steady
