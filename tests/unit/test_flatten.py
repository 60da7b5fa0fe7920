from dataclasses import replace

import numpy as np
import pytest

from runtime.scheduling.group_tables import FIRST_WIDTH
from runtime.scheduling.output import BlockCopy, ScheduledSequence, SchedulerOutput, TableChange
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.step_plan import StepPlan
from tests.scheduling import make_scheduler, make_sequence, make_table
from tests.steps import finish

pytestmark = pytest.mark.unit


def part(scheduled: tuple[Sequence, int, int]) -> ScheduledSequence:
    """A sequence, its computed tokens, and how many it is fed."""
    sequence, num_computed, count = scheduled
    sequence.num_computed_tokens = num_computed
    return ScheduledSequence.of(sequence, count)


def make_output(
    step_id: int,
    *scheduled: tuple[Sequence, int, int],
    steady: tuple[Sequence, ...] = (),
    removed: tuple[int, ...] = (),
    added: tuple[Sequence, ...] = (),
    changed: tuple[TableChange, ...] = (),
    copies: tuple[BlockCopy, ...] = (),
) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        steady=steady,
        scheduled=tuple(map(part, scheduled)),
        removed=removed,
        added=added,
        changed=changed,
        copies=copies,
    )


def change(sequence_id: int, *appended: list[int], first: int = 0) -> TableChange:
    return TableChange(sequence_id, (first,) * len(appended), appended)


def tables_of(plan: StepPlan) -> list[tuple[list[int], list[int], list[int]]]:
    return [
        (each.num_blocks.tolist(), each.first_blocks.tolist(), each.block_ids.tolist())
        for each in plan.block_tables
    ]


def test_the_batch_of_the_architecture_page() -> None:
    """ARCHITECTURE, "A step": a new request, and one with 42 tokens that feeds 345."""
    table = make_table(max_num_seqs=4, num_groups=1)
    new = make_sequence(7, [101, 872, 2304, 1198])
    old = make_sequence(3, [*range(42), 345])
    changed = (change(7, [7]), change(3, [12, 23, 5]))
    output = make_output(1, (new, 0, 4), (old, 42, 1), added=(new, old), changed=changed)

    plan = table.flatten(output)

    assert plan.input_ids.tolist() == [101, 872, 2304, 1198, 345]
    assert plan.positions.tolist() == [0, 1, 2, 3, 42]
    assert plan.sequence_ids.tolist() == [7, 3]
    assert plan.seq_lens.tolist() == [0, 42]
    assert plan.query_lens.tolist() == [4, 1]
    assert tables_of(plan) == [([1, 3], [0, 0], [7, 12, 23, 5])]
    assert plan.sample_index.tolist() == [3, 4] == (np.cumsum(plan.query_lens) - 1).tolist()
    assert plan.sample_sequence.tolist() == [0, 1]
    assert plan.block_copies.shape == (0, 2)


def test_who_is_steady_comes_first_in_the_plan() -> None:
    table = make_table(max_num_seqs=4, num_groups=1)
    new, old = make_sequence(7, [101, 872]), make_sequence(3, [*range(42), 345])
    old.num_computed_tokens = 43  # once this step is through
    changed = (change(7, [7]), change(3, [12, 23, 5]))
    plan = table.flatten(
        make_output(1, (new, 0, 2), steady=(old,), added=(new, old), changed=changed)
    )
    assert plan.input_ids.tolist() == [345, 101, 872]
    assert plan.positions.tolist() == [42, 0, 1]
    assert plan.sequence_ids.tolist() == [3, 7]
    assert plan.seq_lens.tolist() == [42, 0]
    assert plan.query_lens.tolist() == [1, 2]
    assert tables_of(plan) == [([3, 1], [0, 0], [12, 23, 5, 7])]
    assert plan.sample_index.tolist() == [0, 2]
    assert plan.sample_sequence.tolist() == [0, 1]


def test_a_chunk_in_the_middle_of_a_prompt_is_not_sampled() -> None:
    table = make_table(max_num_seqs=4, num_groups=1)
    chunked, short = make_sequence(1, range(10)), make_sequence(2, [5, 6])
    changed = (change(1, [0, 1]), change(2, [2]))
    added = (chunked, short)
    plan = table.flatten(
        make_output(1, (chunked, 4, 4), (short, 0, 2), added=added, changed=changed)
    )
    assert plan.input_ids.tolist() == [4, 5, 6, 7, 5, 6]
    assert plan.positions.tolist() == [4, 5, 6, 7, 0, 1]
    assert plan.sample_index.tolist() == [5]
    assert plan.sample_sequence.tolist() == [1]


def test_steady_sequences_feed_their_last_tokens_from_step_to_step() -> None:
    table = make_table(max_num_seqs=4, num_groups=1)
    steady = (make_sequence(1, [1, 2, 3]), make_sequence(2, [4, 5]))
    for sequence in steady:
        sequence.num_computed_tokens = sequence.num_tokens  # once this step is through
    changed = (change(1, [0]), change(2, [1]))
    first = table.flatten(make_output(1, steady=steady, added=steady, changed=changed))
    tables = tables_of(first)
    for sequence in steady:
        sequence.token_ids.append(10 + sequence.sequence_id)
        sequence.num_computed_tokens += 1
    second = table.flatten(make_output(2, steady=steady))
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([3, 5], [11, 12])
    assert (first.positions.tolist(), second.positions.tolist()) == ([2, 1], [3, 2])
    assert first.seq_lens.tolist() == [2, 1]  # unharmed by the step after it
    assert second.seq_lens.tolist() == [3, 2]
    assert second.sample_index.tolist() == second.sample_sequence.tolist() == [0, 1]
    assert tables_of(second) == tables


def test_steady_sequences_are_looked_at_anew_when_somebody_leaves() -> None:
    table = make_table(max_num_seqs=4, num_groups=1)
    one, other = make_sequence(1, [1, 2, 3]), make_sequence(2, [4, 5])
    for sequence in (one, other):
        sequence.num_computed_tokens = sequence.num_tokens  # once this step is through
    both = (one, other)
    changed = (change(1, [0]), change(2, [1]))
    table.flatten(make_output(1, steady=both, added=both, changed=changed))
    other.token_ids.append(6)
    other.num_computed_tokens = 3
    plan = table.flatten(make_output(2, steady=(other,), removed=(1,)))
    assert plan.sequence_ids.tolist() == [2]
    assert plan.seq_lens.tolist() == plan.positions.tolist() == [2]
    assert tables_of(plan) == [([1], [0], [1])]


def test_plans_are_those_of_a_table_that_has_seen_only_this_step() -> None:
    """What is resident makes no difference."""
    scheduler = make_scheduler(
        num_blocks=24, block_size=2, windows=(0, 5), max_num_batched_tokens=7, max_num_seqs=4
    )
    table = make_table(max_num_seqs=4, num_groups=2)
    for sequence_id in range(8):
        prompt = [sequence_id] * (1 + 2 * sequence_id % 9)
        scheduler.add(make_sequence(sequence_id, prompt, max_tokens=3 + sequence_id))
    while scheduler.has_work:
        output = scheduler.schedule()
        plan = table.flatten(output)
        held = scheduler.cache._held
        running = (*scheduler.running.sequences.values(), *scheduler.running.ending.values())
        fresh = replace(
            output,
            removed=(),
            added=running,
            changed=tuple(
                TableChange(each, tuple(held[each].firsts), tuple(map(list, held[each].tables)))
                for each in (sequence.sequence_id for sequence in running)
            ),
        )
        assert plan == make_table(max_num_seqs=4, num_groups=2).flatten(fresh)
        finish(scheduler, output)


def test_rows_are_reused_and_keep_nothing_of_the_one_before() -> None:
    table = make_table(max_num_seqs=1, num_groups=2)
    first = make_sequence(1, [1], seed=2**64 - 1, min_tokens=3)
    second = make_sequence(2, [2], seed=5)
    table.flatten(
        make_output(1, (first, 0, 1), added=(first,), changed=(change(1, [0, 1], [2, 3], first=4),))
    )
    plan = table.flatten(
        make_output(
            2, (second, 0, 1), removed=(1,), added=(second,), changed=(change(2, [4], [5]),)
        )
    )
    assert tables_of(plan) == [([1], [0], [4]), ([1], [0], [5])]
    assert plan.sampling.seed.tolist() == [5]
    assert plan.sampling.min_length.tolist() == [0]


def test_one_that_is_removed_and_added_in_one_step_starts_anew() -> None:
    table = make_table(max_num_seqs=2, num_groups=1)
    sequence = make_sequence(1, range(9))
    table.flatten(
        make_output(1, (sequence, 0, 4), added=(sequence,), changed=(change(1, [0, 1, 2]),))
    )
    plan = table.flatten(
        make_output(2, (sequence, 0, 4), removed=(1,), added=(sequence,), changed=(change(1, [3]),))
    )
    assert tables_of(plan) == [([1], [0], [3])]


def test_tables_grow_past_their_first_width() -> None:
    table = make_table(max_num_seqs=2, num_groups=1)
    one, other = make_sequence(1, [1]), make_sequence(2, [1])
    blocks = list(range(8 * FIRST_WIDTH))
    near = FIRST_WIDTH - 4
    changed = (change(1, blocks[:near]), change(2, [900]))
    table.flatten(make_output(1, (one, 0, 1), added=(one, other), changed=changed))
    changed = (change(1, blocks[near:]), change(2, [901]))
    plan = table.flatten(make_output(2, (one, 0, 1), (other, 0, 1), changed=changed))
    assert tables_of(plan) == [([len(blocks), 2], [0, 0], [*blocks, 900, 901])]


def test_a_window_sends_its_own_blocks_alone() -> None:
    table = make_table(max_num_seqs=2, num_groups=2)
    sequence = make_sequence(1, range(20))
    added = TableChange(1, (0, 0), ([1, 2, 3], [4, 5, 6]))
    table.flatten(make_output(1, (sequence, 0, 6), added=(sequence,), changed=(added,)))
    moved = TableChange(1, (0, 2), ([7, 8], [9, 10]))
    plan = table.flatten(make_output(2, (sequence, 6, 4), changed=(moved,)))
    assert tables_of(plan) == [([5], [0], [1, 2, 3, 7, 8]), ([3], [2], [6, 9, 10])]
    moved = TableChange(1, (0, 4), ([], []))
    plan = table.flatten(make_output(3, (sequence, 10, 1), changed=(moved,)))
    assert tables_of(plan)[1] == ([1], [4], [10])


def test_a_window_may_move_past_all_of_its_blocks_or_start_far_in() -> None:
    table = make_table(max_num_seqs=2, num_groups=1)
    sequence = make_sequence(1, range(20))
    table.flatten(
        make_output(1, (sequence, 8, 2), added=(sequence,), changed=(change(1, [4, 5], first=4),))
    )
    plan = table.flatten(make_output(2, (sequence, 10, 2), changed=(change(1, [6], first=6),)))
    assert tables_of(plan) == [([1], [6], [6])]


def test_block_copies_travel_in_order() -> None:
    table = make_table(max_num_seqs=2, num_groups=1)
    sequence = make_sequence(1, [1])
    output = make_output(
        1,
        (sequence, 0, 1),
        added=(sequence,),
        changed=(change(1, [0]),),
        copies=(BlockCopy(5, 6), BlockCopy(5, 2)),
    )
    assert table.flatten(output).block_copies.tolist() == [[5, 6], [5, 2]]


@pytest.mark.parametrize(("min_tokens", "min_length"), [(0, 0), (1, 4), (5, 8)])
def test_min_length_counts_from_the_start_of_the_prompt(min_tokens: int, min_length: int) -> None:
    table = make_table(max_num_seqs=1, num_groups=1)
    sequence = make_sequence(1, [1, 2, 3], min_tokens=min_tokens)
    plan = table.flatten(
        make_output(1, (sequence, 0, 3), added=(sequence,), changed=(change(1, [0]),))
    )
    assert plan.sampling.min_length.tolist() == [min_length]


def test_plans_are_compared_by_content() -> None:
    def plan(token: int) -> StepPlan:
        sequence = make_sequence(1, [token])
        output = make_output(1, (sequence, 0, 1), added=(sequence,), changed=(change(1, [0]),))
        return make_table(max_num_seqs=1, num_groups=1).flatten(output)

    assert plan(1) == plan(1)
    assert plan(1) != plan(2)
