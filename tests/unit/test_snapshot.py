"""What the past leaves in a scheduler goes over to another."""

import pytest

from runtime.scheduling.scheduler import Scheduler
from runtime.scheduling.snapshot import set_state, take_state
from tests.scheduling import make_scheduler, make_sequence
from tests.steps import drain, num_cached, step

pytestmark = pytest.mark.unit

WINDOWS = (0, 6)


def make_used() -> Scheduler:
    scheduler = make_scheduler(num_blocks=40, windows=WINDOWS)
    for sequence_id, salt in ((1, ""), (2, "salt"), (3, "")):
        prompt = [*range(1, 20), sequence_id]
        scheduler.add(make_sequence(sequence_id, prompt, cache_salt=salt), now=1.5)
    drain(scheduler)
    return scheduler


def make_copy(scheduler: Scheduler) -> Scheduler:
    other = make_scheduler(num_blocks=40, windows=WINDOWS)
    set_state(other, take_state(scheduler))
    other.check_invariants()
    return other


def test_a_copy_has_the_same_state() -> None:
    scheduler = make_used()
    state = take_state(scheduler)
    assert state.removed
    copied = take_state(make_copy(scheduler))
    for name in state.__slots__:
        if name != "removed":
            assert getattr(copied, name) == getattr(state, name), name


def test_prefixes_are_found_as_before() -> None:
    scheduler = make_used()
    other = make_copy(scheduler)
    for salt, wanted in (("", 20), ("salt", 20), ("other", 0)):
        prompt = [*range(1, 20), 2 if salt else 1]
        assert num_cached(other, prompt, salt=salt) == wanted
        assert num_cached(scheduler, prompt, salt=salt) == wanted


def test_both_go_on_alike_until_blocks_were_evicted() -> None:
    scheduler = make_used()
    other = make_copy(scheduler)
    for sequence_id in range(10, 30):
        prompt = [sequence_id % 3, *range(1, 2 + sequence_id)]
        changes = []
        for each in (scheduler, other):
            each.add(make_sequence(sequence_id, prompt))
            output = step(each)
            changes.append((output.step_id, output.changed, output.added[0].num_computed_tokens))
            drain(each)
        assert changes[0] == changes[1]
    assert scheduler.cache.pool.num_cached > 20
