"""What must hold for the sequences of a scheduler between two of its calls."""

from collections.abc import Mapping

from runtime.scheduling.block_pool import BlockPool
from runtime.scheduling.limits import SchedulerLimits
from runtime.scheduling.running import RunningSet
from runtime.scheduling.sequence import Sequence, Status
from runtime.scheduling.waiting import WaitingRoom


def check_live(
    sequences: Mapping[int, Sequence], waiting: WaitingRoom, running: RunningSet
) -> None:
    """Asserts that those that live are where their status says."""
    held = [each for each in sequences.values() if each.status is Status.HELD]
    live = [*running.sequences.values(), *running.ending.values(), *waiting, *held]
    assert {each.sequence_id for each in live} == sequences.keys()
    assert len(live) == len(sequences)
    assert all(each.status is Status.WAITING for each in waiting)
    assert all(each.num_computed_tokens == 0 for each in [*waiting, *held])
    assert all(each.fork_of is not None and each in each.fork_of.forks for each in held)


def check_between_steps(running: RunningSet, pool: BlockPool, limits: SchedulerLimits) -> None:
    """Asserts what holds while no step is in flight."""
    assert not running.ending, "no step brings their last tokens"
    assert not running.num_unsettled, "no step brings them tokens, and they are kept"
    assert sum(each.awaits_scores for each in running.behind) <= 1, "two prompts scored in part"
    behind = [each for each in running.behind if each.num_tokens - each.num_computed_tokens > 1]
    # One that has been scored may have tokens left to feed; who stalled has one.
    assert len(behind) <= limits.max_num_partial_prefills + 1
    every = [*running.sequences.values()]
    assert all(each.num_pending_tokens == 0 for each in every), "no step brings these tokens"
    if not running.sequences:
        assert pool.num_free == pool.num_blocks, "blocks are lost"
