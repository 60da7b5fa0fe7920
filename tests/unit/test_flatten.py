import numpy as np
import pytest

from runtime.scheduling.flatten import BatchTable
from runtime.scheduling.output import BlocksAppended, ScheduledSequence, SchedulerOutput
from runtime.scheduling.sequence import Sequence
from tests.scheduling import make_sequence

pytestmark = pytest.mark.unit


def make_output(
    step_id: int,
    *scheduled: tuple[Sequence, int, int],
    removed: tuple[int, ...] = (),
    added: tuple[Sequence, ...] = (),
    appended: tuple[BlocksAppended, ...] = (),
) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        scheduled=tuple(ScheduledSequence(*each) for each in scheduled),
        removed=removed,
        added=added,
        appended=appended,
    )


def test_the_batch_of_the_architecture_page() -> None:
    """ARCHITECTURE, "A step": a new request, and one with 42 tokens that feeds 345."""
    table = BatchTable(max_num_seqs=4, num_groups=1)
    new = make_sequence(7, [101, 872, 2304, 1198])
    old = make_sequence(3, [*range(42), 345])
    appended = (BlocksAppended(7, ([7],)), BlocksAppended(3, ([12, 23, 5],)))
    output = make_output(1, (new, 0, 4), (old, 42, 1), added=(new, old), appended=appended)

    plan = table.flatten(output)

    assert plan.input_ids.tolist() == [101, 872, 2304, 1198, 345]
    assert plan.positions.tolist() == [0, 1, 2, 3, 42]
    assert plan.sequence_ids.tolist() == [7, 3]
    assert plan.seq_lens.tolist() == [0, 42]
    assert plan.query_lens.tolist() == [4, 1]
    (tables,) = plan.block_tables
    assert tables.num_blocks.tolist() == [1, 3]
    assert tables.block_ids.tolist() == [7, 12, 23, 5]
    assert plan.sample_index.tolist() == [3, 4] == (np.cumsum(plan.query_lens) - 1).tolist()
    assert plan.sample_sequence.tolist() == [0, 1]


def test_a_chunk_in_the_middle_of_a_prompt_is_not_sampled() -> None:
    table = BatchTable(max_num_seqs=4, num_groups=1)
    chunked, short = make_sequence(1, range(10)), make_sequence(2, [5, 6])
    appended = (BlocksAppended(1, ([0, 1],)), BlocksAppended(2, ([2],)))
    added = (chunked, short)
    plan = table.flatten(
        make_output(1, (chunked, 4, 4), (short, 0, 2), added=added, appended=appended)
    )
    assert plan.input_ids.tolist() == [4, 5, 6, 7, 5, 6]
    assert plan.positions.tolist() == [4, 5, 6, 7, 0, 1]
    assert plan.sample_index.tolist() == [5]
    assert plan.sample_sequence.tolist() == [1]


def test_rows_are_reused_and_keep_nothing_of_the_one_before() -> None:
    table = BatchTable(max_num_seqs=1, num_groups=2)
    first = make_sequence(1, [1], seed=2**64 - 1)
    second = make_sequence(2, [2], seed=5)
    table.flatten(
        make_output(
            1,
            (first, 0, 1),
            added=(first,),
            appended=(BlocksAppended(1, ([0, 1], [2, 3])),),
        )
    )
    plan = table.flatten(
        make_output(
            2,
            (second, 0, 1),
            removed=(1,),
            added=(second,),
            appended=(BlocksAppended(2, ([4], [5])),),
        )
    )
    assert [tables.block_ids.tolist() for tables in plan.block_tables] == [[4], [5]]
    assert plan.sampling.seed.tolist() == [5]


def test_tables_grow_past_their_first_width() -> None:
    table = BatchTable(max_num_seqs=2, num_groups=1)
    sequence = make_sequence(1, [1])
    blocks = list(range(500))
    table.flatten(
        make_output(
            1, (sequence, 0, 1), added=(sequence,), appended=(BlocksAppended(1, (blocks[:60],)),)
        )
    )
    plan = table.flatten(
        make_output(2, (sequence, 0, 1), appended=(BlocksAppended(1, (blocks[60:],)),))
    )
    assert plan.block_tables[0].block_ids.tolist() == blocks


def test_plans_are_compared_by_content() -> None:
    def plan(token: int) -> object:
        sequence = make_sequence(1, [token])
        output = make_output(
            1, (sequence, 0, 1), added=(sequence,), appended=(BlocksAppended(1, ([0],)),)
        )
        return BatchTable(max_num_seqs=1, num_groups=1).flatten(output)

    assert plan(1) == plan(1)
    assert plan(1) != plan(2)
