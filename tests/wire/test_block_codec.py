"""Block tables and copies on their way to a rank: what arrives, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protos import worker_pb2
from runtime.executor.codec import encode_step
from runtime.scheduling.step_plan import BlockTables
from tests.transport import LIMITS, example_plan, ints, model_spec
from workers.batch import Batch
from workers.codec import NotBuiltError, StepLimits, decode_plan, limits_of
from workers.config import CacheLayout
from workers.errors import StepError

pytestmark = pytest.mark.wire

COPY = worker_pb2.BlockOp.KIND_COPY


def sent(**changes: Any) -> worker_pb2.StepPlan:
    data = encode_step(example_plan(**changes), epoch=3, return_input_hash=False)
    return worker_pb2.StepRequest.FromString(data).plan


def table(num_blocks: list[int], first_blocks: list[int]) -> BlockTables:
    """As many blocks, with the ids 1, 2, 3 and so on."""
    return BlockTables(
        num_blocks=ints(*num_blocks),
        first_blocks=ints(*first_blocks),
        block_ids=np.arange(1, sum(num_blocks) + 1, dtype=np.int32),
    )


def decoded(
    *tables: BlockTables, windows: tuple[int, ...], chunks: tuple[int, ...] | None = None
) -> Batch:
    limits = replace(LIMITS, windows=windows, chunks=chunks or (0,) * len(windows))
    return decode_plan(worker_pb2.StepRequest(plan=sent(block_tables=tables)), limits)


def test_each_cache_group_has_its_table() -> None:
    batch = decoded(table([2, 3], [0, 0]), table([1, 2], [0, 1]), windows=(0, 20))

    full, windowed = batch.block_tables
    assert full.block_ids.tolist() == [[1, 2, 0], [3, 4, 5]]
    assert full.first_blocks.tolist() == [0, 0]
    assert windowed.block_ids.tolist() == [[1, 0], [2, 3]]
    assert windowed.first_blocks.tolist() == [0, 1]


@pytest.mark.parametrize(("window", "last"), [(1, 2), (11, 2), (12, 1), (27, 1), (28, 0), (99, 0)])
def test_a_table_starts_no_later_than_the_window(window: int, last: int) -> None:
    """The second sequence feeds position 42; blocks of 16 begin at 16 and 32."""
    batch = decoded(table([1, 3 - last], [0, last]), windows=(window,))

    assert batch.block_tables[0].first_blocks.tolist() == [0, last]
    with pytest.raises(
        StepError,
        match=rf"^block_tables\[0\].first_blocks\[1\] is {last + 1}: must be in \[0, {last}\]$",
    ):
        decoded(table([1, 3], [0, last + 1]), windows=(window,))


@pytest.mark.parametrize(
    ("chunk", "last"), [(1, 2), (9, 2), (14, 2), (32, 2), (20, 2), (31, 1), (43, 0), (99, 0)]
)
def test_a_table_starts_no_later_than_the_chunk(chunk: int, last: int) -> None:
    """As above; the chunk of position 42 begins at its last multiple up to there."""
    batch = decoded(table([1, 3 - last], [0, last]), windows=(0,), chunks=(chunk,))

    assert batch.block_tables[0].first_blocks.tolist() == [0, last]
    with pytest.raises(
        StepError,
        match=rf"^block_tables\[0\].first_blocks\[1\] is {last + 1}: must be in \[0, {last}\]$",
    ):
        decoded(table([1, 3], [0, last + 1]), windows=(0,), chunks=(chunk,))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (table([1, 3], [0]), r"first_blocks has 1 values, sequence_ids has 2: must be equal"),
        (table([1, 3], [0, -1]), r"first_blocks\[1\] is -1: must be in \[0, 1\]"),
        (table([1, 3], [1, 0]), r"first_blocks\[0\] is 1: must be in \[0, 0\]"),
        (table([1, 1], [0, 1]), r"num_blocks\[1\] is 1: must be in \[2, 32\]"),
        (table([0, 3], [0, 1]), r"num_blocks\[0\] is 0: must be in \[1, 32\]"),
        (table([1, 33], [0, 1]), r"num_blocks\[1\] is 33: must be in \[2, 32\]"),
    ],
)
def test_a_table_that_does_not_reach_is_refused(tables: BlockTables, message: str) -> None:
    with pytest.raises(StepError, match=r"block_tables\[1\]." + message):
        decoded(table([1, 3], [0, 0]), tables, windows=(0, 20))


def test_a_driver_that_sends_no_first_blocks_is_refused() -> None:
    plan = sent()
    plan.block_tables[0].first_blocks = b""

    with pytest.raises(StepError, match=r"block_tables\[0\].first_blocks has 0 values"):
        decode_plan(worker_pb2.StepRequest(plan=plan), LIMITS)


def test_a_group_sees_as_far_as_its_layers() -> None:
    layer = model_spec().layers[0]
    kinds = [(0, 0), (5, 0), (0, 7), (5, 0)]
    layers = tuple(replace(layer, window=window, chunk=chunk) for window, chunk in kinds)
    layout = CacheLayout(block_size=8, num_blocks=9, groups=((1, 3), (2,), (0,)))

    assert limits_of(model_spec(layers=layers), layout) == StepLimits(
        vocab_size=4096,
        max_model_len=128,
        num_blocks=9,
        block_size=8,
        windows=(5, 0, 0),
        chunks=(0, 7, 0),
    )


def test_copies_arrive_in_order() -> None:
    plan = sent(block_copies=np.array([[7, 3], [3, 31], [0, 7]], np.int32))

    batch = decode_plan(worker_pb2.StepRequest(plan=plan), LIMITS)

    assert batch.block_copies.tolist() == [[7, 3], [3, 31], [0, 7]]
    assert [op.kind for op in plan.block_ops] == [COPY] * 3


def test_a_step_without_copies_has_none() -> None:
    assert decode_plan(worker_pb2.StepRequest(plan=sent()), LIMITS).block_copies.shape == (0, 2)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (32, 1, r"block_ops.source_block has 32: must be in \[0, 32\)"),
        (1, 32, r"block_ops.target_block has 32: must be in \[0, 32\)"),
        (2**32 - 1, 1, r"block_ops.source_block has 4294967295: must be in \[0, 32\)"),
    ],
)
def test_a_copy_outside_the_pool_is_refused(source: int, target: int, message: str) -> None:
    plan = sent(block_copies=np.array([[5, 6]], np.int32))
    plan.block_ops.add(kind=COPY, source_block=source, target_block=target)

    with pytest.raises(StepError, match=message):
        decode_plan(worker_pb2.StepRequest(plan=plan), LIMITS)


@pytest.mark.parametrize("kind", [0, 2])
def test_another_operation_than_a_copy_is_not_built(kind: int) -> None:
    plan = sent(block_copies=np.array([[5, 6]], np.int32))
    plan.block_ops.add(kind=kind, source_block=1, target_block=2)

    with pytest.raises(NotBuiltError, match=rf"^block_ops\[1\].kind is {kind}: only KIND_COPY"):
        decode_plan(worker_pb2.StepRequest(plan=plan), LIMITS)
