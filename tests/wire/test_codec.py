"""A step on its way from the driver to a rank, and its tokens on their way back."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from protos import worker_pb2
from runtime.executor.codec import decode_result, encode_step
from runtime.request import TokenLogprobs
from runtime.scheduling.step_plan import (
    BlockTables,
    Fault,
    StepPlan,
    StepResult,
    TokenReferences,
)
from tests.transport import (
    LIMITS,
    example_plan,
    ints,
    make_logprobs,
    make_samples,
    model_spec,
    result_of,
)
from workers.codec import (
    NotBuiltError,
    decode_layout,
    decode_plan,
    input_hash,
)
from workers.errors import StepError
from workers.sampling_codec import encode_result

pytestmark = pytest.mark.wire

Wire = worker_pb2.StepPlan


def on_the_wire(plan: StepPlan) -> worker_pb2.StepRequest:
    data = encode_step(plan, epoch=3, return_input_hash=True)
    return worker_pb2.StepRequest.FromString(data)


def test_the_batch_of_the_architecture_page_arrives_as_it_was_sent() -> None:
    request = on_the_wire(example_plan(step_id=9))

    batch = decode_plan(request, LIMITS)

    assert (request.epoch, request.step_id, request.return_input_hash) == (3, 9, True)
    assert batch.input_ids.tolist() == [101, 872, 2304, 1198, 345]
    assert batch.positions.tolist() == [0, 1, 2, 3, 42]
    assert batch.sequence_ids == (2**64 - 1, 12)
    assert batch.seq_lens.tolist() == [0, 42]
    assert batch.query_lens.tolist() == [4, 1]
    assert [table.block_ids.tolist() for table in batch.block_tables] == [[[7, 0, 0], [12, 23, 5]]]
    assert batch.sample_index.tolist() == [3, 4]
    assert batch.sample_sequence.tolist() == [0, 1]
    assert batch.sampling.temperature.tolist() == [0.0, 0.5]
    assert batch.sampling.top_k.tolist() == [0, 40]
    assert batch.sampling.top_p.tolist() == pytest.approx([1.0, 0.9])
    assert batch.sampling.seed.tolist() == [-1, 7]
    assert batch.sampling.min_length.tolist() == [0, 46]
    integers = (
        batch.input_ids,
        batch.positions,
        batch.seq_lens,
        batch.query_lens,
        batch.sampling.top_k,
    )
    assert {tensor.dtype for tensor in (*integers, batch.sampling.min_length)} == {torch.int32}
    assert batch.sampling.seed.dtype == torch.int64


def test_a_step_that_samples_nothing_arrives() -> None:
    request = on_the_wire(example_plan(sample_index=ints(), sample_sequence=ints()))

    batch = decode_plan(request, LIMITS)

    assert len(batch.sample_index) == len(batch.sample_sequence) == 0


def bad(name: str, *values: int, dtype: str = "<i4") -> Callable[[Wire], None]:
    def change(plan: Wire) -> None:
        setattr(plan, name, np.array(values, dtype).tobytes())

    return change


def bad_table(name: str, *values: int) -> Callable[[Wire], None]:
    def change(plan: Wire) -> None:
        setattr(plan.block_tables[0], name, np.array(values, "<i4").tobytes())

    return change


def bad_column(name: str, *values: float, dtype: str) -> Callable[[Wire], None]:
    def change(plan: Wire) -> None:
        setattr(plan.sampling, name, np.array(values, dtype).tobytes())

    return change


def odd_bytes(plan: Wire) -> None:
    plan.input_ids = b"\0" * 7


def no_tables(plan: Wire) -> None:
    del plan.block_tables[:]


MALFORMED = {
    "odd bytes": (odd_bytes, "input_ids has 7 bytes: must be a multiple of 4"),
    "no sequences": (bad("sequence_ids", dtype="<u8"), "sequence_ids is empty"),
    "one sequence twice": (bad("sequence_ids", 5, 5, dtype="<u8"), "sequence_ids has 2 ids, not"),
    "query_lens length": (bad("query_lens", 5), "query_lens has 1 values, sequence_ids has 2"),
    "query_lens sum": (bad("query_lens", 4, 2), "query_lens sum to 6, input_ids has 5 tokens"),
    "query_lens zero": (bad("query_lens", 5, 0), r"query_lens has 0: must be in \[1, 129\)"),
    "seq_lens length": (bad("seq_lens", 0), "seq_lens has 1 values, sequence_ids has 2"),
    "seq_lens negative": (bad("seq_lens", -1, 42), r"seq_lens has -1: must be in \[0, 129\)"),
    "too long": (bad("seq_lens", 0, 128), r"seq_lens \+ query_lens has 129: must be in"),
    "token id": (bad("input_ids", 1, 2, 3, 4, 4096), r"input_ids has 4096: must be in \[0, 4096\)"),
    "token id negative": (bad("input_ids", 1, 2, -3, 4, 5), "input_ids has -3"),
    "positions length": (bad("positions", 0, 1), "positions has 2 values, input_ids has 5"),
    "positions": (bad("positions", 0, 1, 2, 3, 41), r"positions\[4\] is 41: must be 42"),
    "sample length": (
        bad("sample_sequence", 0),
        "sample_sequence has 1 values, sample_index has 2",
    ),
    "sample range": (bad("sample_sequence", 0, 2), r"sample_sequence has 2: must be in \[0, 2\)"),
    "sample row": (bad("sample_index", 4, 4), r"sample_index\[0\] is 4: must be in \[0, 3\]"),
    "no tables": (no_tables, "block_tables has 0 tables, the cache has 1 groups"),
    "table length": (bad_table("num_blocks", 4), r"block_tables\[0\].num_blocks has 1 values"),
    "table sum": (
        bad_table("num_blocks", 2, 3),
        r"block_tables\[0\].num_blocks sum to 5, block_ids has 4 blocks",
    ),
    "table too short": (
        bad_table("num_blocks", 2, 2),
        r"block_tables\[0\].num_blocks\[1\] is 2: must be in \[3, 32\]",
    ),
    "block id": (
        bad_table("block_ids", 7, 12, 32, 5),
        r"block_tables\[0\].block_ids has 32: must be in \[0, 32\)",
    ),
    "temperature": (
        bad_column("temperature", 0, float("nan"), dtype="<f4"),
        "sampling.temperature nan must be in",
    ),
    "infinite temperature": (
        bad_column("temperature", 0, float("inf"), dtype="<f4"),
        "sampling.temperature inf must be in",
    ),
    "top_k": (bad_column("top_k", 0, -1, dtype="<i4"), "sampling.top_k -1 must be in"),
    "top_p": (bad_column("top_p", 1, 0, dtype="<f4"), r"sampling.top_p 0.0 must be in"),
    "min_length": (
        bad_column("min_length", 0, -1, dtype="<i4"),
        "sampling.min_length -1 must be in",
    ),
    "min_length length": (
        bad_column("min_length", 1, dtype="<i4"),
        "sampling.min_length has 1 values, sequence_ids has 2",
    ),
    "seed": (bad_column("seed", 1, dtype="<u8"), "sampling.seed has 1 values, sequence_ids has 2"),
}


@pytest.mark.parametrize(("change", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_step_is_refused_and_its_array_named(
    change: Callable[[Wire], None], message: str
) -> None:
    plan = on_the_wire(example_plan()).plan
    change(plan)

    with pytest.raises(StepError, match=message):
        decode_plan(worker_pb2.StepRequest(plan=plan), LIMITS)


def test_a_second_sample_of_a_sequence_is_not_built() -> None:
    request = on_the_wire(example_plan())
    bad("sample_sequence", 0, 0)(request.plan)

    with pytest.raises(NotBuiltError, match="sample_sequence"):
        decode_plan(request, LIMITS)


def referring(**changes: Any) -> worker_pb2.StepRequest:
    """Row 2 of T is sample 1 of step 6, and row 4 is sample 0 of it."""
    fields = {
        "rows": ints(2, 4),
        "step_ids": np.array([6, 6], np.uint64),
        "sample_rows": ints(1, 0),
    }
    return on_the_wire(example_plan(token_references=TokenReferences(**(fields | changes))))


def test_references_arrive() -> None:
    references = decode_plan(referring(), LIMITS, {5: 9, 6: 2}).references

    assert references.rows.tolist() == [2, 4]
    assert references.step_ids.tolist() == [6, 6]
    assert references.sample_rows.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ints(2, 5)}, r"rows has 5: must be in \[0, 5\)"),
        ({"rows": ints(4, 2)}, r"rows \[4, 2\] must rise"),
        ({"rows": ints(2)}, "step_ids has 2 values, rows has 1"),
        (
            {"step_ids": np.array([6, 4], np.uint64)},
            r"step_ids has 4: samples are kept of \[5, 6\]",
        ),
        ({"sample_rows": ints(1, 2)}, r"sample_rows has 2: must be in \[0, 2\)"),
        ({"sample_rows": ints(-1, 0)}, r"sample_rows has -1: must be in \[0, 2\)"),
        ({"sample_rows": ints(1)}, "sample_rows has 1 values, rows has 2"),
    ],
)
def test_references_to_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StepError, match=f"token_references.{message}"):
        decode_plan(referring(**changes), LIMITS, {5: 9, 6: 2})


def test_tokens_come_back_in_order() -> None:
    batch = replace(
        decode_plan(on_the_wire(example_plan()), LIMITS),
        sequence_ids=(2**64 - 1, 12, 13),
        sample_sequence=torch.tensor([0, 2, 1]),
    )
    logprobs = make_logprobs((0, -0.5, [17, 3], [-0.5, -1.5]), (2, -9999.0, [], []))
    samples = make_samples([17, 0, 5], faults=[0, 2, 0], logprobs=logprobs)
    result = encode_result(batch, samples, make_logprobs((0, -2.0, [4], [-0.25])))

    decoded = decode_result(worker_pb2.StepReply(step_id=4, result=result))

    assert decoded == StepResult(
        step_id=4,
        sequence_ids=[2**64 - 1, 13, 12],
        token_ids=[17, 0, 5],
        faults={1: Fault.EMPTY_SUPPORT},
        logprobs={
            0: TokenLogprobs(-0.5, (17, 3), (-0.5, -1.5)),
            2: TokenLogprobs(-9999.0, (), ()),
        },
        scores=[TokenLogprobs(-2.0, (4,), (-0.25,))],
    )


def test_a_step_that_samples_nothing_has_an_empty_result() -> None:
    decoded = decode_result(worker_pb2.StepReply(step_id=4, result=result_of({})))

    assert decoded == StepResult(step_id=4, sequence_ids=[], token_ids=[])


@pytest.mark.parametrize(
    ("array", "values", "message"),
    [
        ("num_tokens", [1], "num_tokens has 1 values, sequence_ids has 2"),
        ("token_ids", [10, 11, 12], "token_ids has 3 values, sequence_ids has 2"),
        ("num_tokens", [1, 2], "num_tokens has 2: must be 1"),
        ("num_tokens", [0, 1], "num_tokens has 0: must be 1"),
    ],
)
def test_a_malformed_result_is_refused(array: str, values: list[int], message: str) -> None:
    result = result_of({5: 10, 6: 11})
    setattr(result, array, np.array(values, "<i4").tobytes())

    with pytest.raises(ValueError, match=message):
        decode_result(worker_pb2.StepReply(result=result))


def test_the_input_hash_is_that_of_the_protocol() -> None:
    plan = example_plan(block_copies=np.array([[5, 9]], np.int32))
    batch = decode_plan(on_the_wire(plan), LIMITS)

    data = plan.input_ids.tobytes() + plan.positions.tobytes() + plan.query_lens.tobytes()
    data += ints(5, 9, *(0, 0), *(7, 0, 0, 12, 23, 5)).tobytes()

    assert input_hash(batch, batch.input_ids) == int.from_bytes(
        hashlib.sha256(data).digest()[:8], "little"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"input_ids": ints(101, 872, 2304, 1198, 346)},
        {"seq_lens": ints(1, 42), "positions": ints(1, 2, 3, 4, 42)},
        {"block_copies": np.array([[5, 9]], np.int32)},
        {
            "block_tables": (
                BlockTables(
                    num_blocks=ints(1, 3), first_blocks=ints(0, 0), block_ids=ints(7, 12, 5, 23)
                ),
            )
        },
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_input_has_another_hash(changes: dict[str, Any]) -> None:
    batches = [decode_plan(on_the_wire(example_plan(**each)), LIMITS) for each in ({}, changes)]
    one, other = (input_hash(batch, batch.input_ids) for batch in batches)
    assert one != other


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "groups", "message"),
    [
        (0, 8, [[0, 1]], "block_size=0 must be at least 1"),
        (16, 0, [[0, 1]], "num_blocks=0 must be at least 1"),
        (12, 8, [[0, 1]], "block_size=12 must be a multiple of 8"),
        (16, 8, [[0], [0]], r"groups name layers \[0, 0\]"),
        (16, 8, [[0, 1], [1], [2]], r"groups name layers \[0, 1, 1, 2\]"),
        (16, 8, [[0, 1], [], [2]], r"groups\[1\] has layers of \(window, chunk\) \[\]"),
        (16, 8, [[0], [1, 2]], r"groups\[1\] .* \[\(0, 0\), \(0, 32\)\]: must be one kind"),
    ],
)
def test_a_malformed_layout_is_refused(
    block_size: int, num_blocks: int, groups: list[list[int]], message: str
) -> None:
    request = worker_pb2.AllocateCacheRequest(
        block_size=block_size,
        num_blocks=num_blocks,
        groups=[worker_pb2.CacheGroup(layers=layers) for layers in groups],
    )

    layer = model_spec().layers[0]
    layers = (layer, layer, replace(layer, chunk=32))

    with pytest.raises(StepError, match=message):
        decode_layout(request, model_spec(block_size_multiple=8, layers=layers))


def test_groups_may_have_different_numbers_of_layers() -> None:
    layer = model_spec().layers[0]
    request = worker_pb2.AllocateCacheRequest(
        block_size=16,
        num_blocks=8,
        groups=[worker_pb2.CacheGroup(layers=layers) for layers in ([2, 0], [1])],
    )

    layout = decode_layout(request, model_spec(layers=(layer, replace(layer, window=9), layer)))

    assert layout.groups == ((2, 0), (1,))
