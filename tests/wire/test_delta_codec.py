"""Deltas of three steps: as they should be, malformed, and out of turn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from protos import worker_pb2
from runtime.errors import WorkerError
from runtime.executor.codec import encode_delta, encode_step
from runtime.executor.deadlines import StepDeadlines
from runtime.executor.grpc_executor import GrpcExecutor
from runtime.scheduling.flatten import BatchTable
from runtime.scheduling.output import ScheduledSequence, SchedulerOutput, TableChange
from runtime.scheduling.step_plan import StepPlan
from tests.scheduling import make_sequence, make_table
from tests.transport import LIMITS, TIMEOUT_S, TOKEN, FakeModel, ints, ready_worker
from workers.batch import Batch
from workers.batch_difference import find_difference
from workers.codec import decode_plan, input_hash
from workers.delta_codec import DeltaDecoder
from workers.errors import OutOfOrderError, StepError

pytestmark = pytest.mark.wire

Delta = worker_pb2.StepDelta
Change = Callable[[Delta], None]
SHARED = {1: 2, 2: 2}
EPOCH = 3


def flatten(table: BatchTable, output: SchedulerOutput) -> StepPlan:
    plan = table.flatten(output)
    return replace(plan, block_tables=tuple(plan.block_tables))


def make_plans() -> list[StepPlan]:
    """Two sequences start in rows 0 and 1; both are steady; one leaves, a third takes its row."""
    table = make_table(max_num_seqs=4, num_groups=1)
    one, two, three = make_sequence(7, range(16)), make_sequence(8, [5, 6]), make_sequence(9, [4])
    first = SchedulerOutput(
        step_id=1,
        steady=(),
        scheduled=(ScheduledSequence.of(one, 16), ScheduledSequence.of(two, 2)),
        removed=(),
        added=(one, two),
        changed=(TableChange(7, (0,), ([3],)), TableChange(8, (0,), ([4],))),
        copies=(),
    )
    plans = [flatten(table, first)]
    one.num_computed_tokens, two.num_computed_tokens = 17, 3  # once the next step is through
    changed = (TableChange(7, (0,), ([5],)),)
    second = SchedulerOutput(
        step_id=2,
        steady=(one, two),
        scheduled=(),
        removed=(),
        added=(),
        changed=changed,
        copies=(),
        awaited_step_id=1,
    )
    plans.append(flatten(table, second))
    two.num_computed_tokens = 4
    third = SchedulerOutput(
        step_id=3,
        steady=(two,),
        scheduled=(ScheduledSequence.of(three, 1),),
        removed=(7,),
        added=(three,),
        changed=(TableChange(9, (0,), ([6],)),),
        copies=(),
        awaited_step_id=2,
    )
    plans.append(flatten(table, third))
    return plans


def make_requests(*, is_checked: bool = False) -> list[worker_pb2.StepRequest]:
    options = {"return_input_hash": False, "share_samples": True, "is_checked": is_checked}
    messages = [encode_delta(plan, epoch=EPOCH, **options) for plan in make_plans()]
    return [worker_pb2.StepRequest.FromString(message) for message in messages]


def whole_requests() -> list[worker_pb2.StepRequest]:
    options = {"return_input_hash": False, "share_samples": True}
    messages = [encode_step(plan, epoch=EPOCH, **options) for plan in make_plans()]
    return [worker_pb2.StepRequest.FromString(message) for message in messages]


def decode_all(requests: list[worker_pb2.StepRequest]) -> list[Batch]:
    decoder = DeltaDecoder()
    return [decoder.decode(request, LIMITS, SHARED) for request in requests]


def test_three_steps_arrive() -> None:
    first, second, third = decode_all(make_requests())

    assert first.sequence_ids == (7, 8)
    assert first.input_ids.tolist() == [*range(16), 5, 6]
    assert first.sample_index.tolist() == [15, 17]
    assert second.sequence_ids == (7, 8)
    assert second.positions.tolist() == second.seq_lens.tolist() == [16, 2]
    assert second.block_tables[0].block_ids.tolist() == [[3, 5], [4, 0]]
    assert second.references.sample_rows.tolist() == [0, 1]
    assert third.sequence_ids == (8, 9)
    assert third.input_ids.tolist() == [0, 4]
    assert third.seq_lens.tolist() == [3, 0]
    assert third.block_tables[0].block_ids.tolist() == [[4], [6]]
    assert third.references.step_ids.tolist() == [2]
    assert third.references.sample_rows.tolist() == [1]
    assert first.seq_lens.tolist() == [0, 0]  # unharmed by the steps after it
    assert second.block_tables[0].first_blocks.tolist() == [0, 0]


def test_ranks_get_the_same_hash_by_deltas_and_whole() -> None:
    whole = [decode_plan(each, LIMITS, SHARED) for each in whole_requests()]
    hashes = [
        [input_hash(batch, batch.input_ids) for batch in batches]
        for batches in (decode_all(make_requests()), whole)
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 3


def put(name: str, *values: float, dtype: str = "<i4") -> Change:
    def change(delta: Delta) -> None:
        setattr(delta, name, np.array(values, dtype).tobytes())

    return change


def rows(name: str, *values: int) -> Change:
    return put(name, *values, dtype="<u2")


def table(name: str, *values: int) -> Change:
    def change(delta: Delta) -> None:
        setattr(delta.table_changes[0], name, np.array(values, "<i4").tobytes())

    return change


def column(name: str, *values: float, dtype: str) -> Change:
    def change(delta: Delta) -> None:
        setattr(delta.added_sampling, name, np.array(values, dtype).tobytes())

    return change


def no_tables(delta: Delta) -> None:
    del delta.table_changes[:]


def both(*changes: Change) -> Change:
    def change(delta: Delta) -> None:
        for each in changes:
            each(delta)

    return change


NOTHING = both(*(put(name) for name in ("rows", "seq_lens", "query_lens", "samples", "input_ids")))
COLUMNS = {
    "temperature": (float("nan"), "<f4"),
    "top_k": (-1, "<i4"),
    "top_p": (0, "<f4"),
    "min_p": (2, "<f4"),
    "min_length": (-1, "<i4"),
    "presence_penalty": (101, "<f4"),
    "frequency_penalty": (-101, "<f4"),
    "repetition_penalty": (0, "<f4"),
    "num_logprobs": (-2, "<i4"),
}
# Of which step, what is changed in it, and what is said then.
MALFORMED = {
    "removed, unknown": (3, rows("removed", 5), "removed has row 5, which no sequence has"),
    "removed twice": (3, rows("removed", 0, 0), "removed has 2 rows, not all different"),
    "removed, but steady": (3, rows("removed", 0, 1), "left lacks row 1, which is removed"),
    "removed, odd bytes": (3, put("removed", 0, dtype="u1"), "removed has 1 bytes"),
    "added, taken": (3, rows("added", 1), "added has row 1, which a sequence has"),
    "added twice": (1, rows("added", 1, 1), "added has 2 rows, not all different"),
    "added ids": (3, put("added_ids", dtype="<u8"), "added_ids has 0 values, delta.added has 1"),
    "id twice": (3, put("added_ids", 8, dtype="<u8"), "added_ids has an id twice"),
    "id twice at once": (1, put("added_ids", 8, 8, dtype="<u8"), "added_ids has an id twice"),
    "column": (3, column("top_k", dtype="<i4"), "sampling.top_k has 0 values"),
    "seed": (3, column("seed", 1, 2, dtype="<u8"), "sampling.seed has 2 values"),
    "changed, unknown": (2, rows("changed", 2), "changed has row 2, which no sequence has"),
    "changed twice": (1, rows("changed", 0, 0), "changed has 2 rows, not all different"),
    "no tables": (2, no_tables, "table_changes has 0 entries, the cache has 1 groups"),
    "firsts length": (2, table("first_blocks", 0, 0), r"first_blocks has 2 values"),
    "firsts negative": (2, table("first_blocks", -1), r"first_blocks\[0\] is -1: must be in \[0"),
    "firsts too far": (2, table("first_blocks", 8), r"first_blocks\[0\] is 8: must be in \[0, 7\]"),
    "what is seen is gone": (2, table("first_blocks", 1), r"first_blocks\[0\] is 1: must be in"),
    "counts length": (2, table("num_blocks", 1, 1), "num_blocks has 2 values, delta.changed has 1"),
    "counts negative": (2, table("num_blocks", -1), r"num_blocks has -1: must be in \[0, 9\)"),
    "counts too many": (2, table("num_blocks", 9), r"num_blocks has 9: must be in \[0, 9\)"),
    "table too long": (2, table("num_blocks", 8), r"blocks of a row has 9: must be in \[0, 9\)"),
    "counts sum": (2, table("num_blocks", 2), "num_blocks sum to 2, block_ids has 1 blocks"),
    "block id": (2, table("block_ids", 32), r"block_ids has 32: must be in \[0, 32\)"),
    "table too short": (
        2,
        both(table("num_blocks", 0), table("block_ids")),
        r"block_tables\[0\] ends\[0\] is 1: must be in \[2,",
    ),
    "left, not steady": (2, rows("left", 0), "left has row 0, which isn't steady"),
    "left twice": (3, rows("left", 0, 0), "left has 2 rows, not all different"),
    "joined, unknown": (2, rows("joined", 0, 2), "joined has row 2, which no sequence has"),
    "joined twice": (2, rows("joined", 0, 0), "joined has 2 rows, not all different"),
    "joined, steady": (
        3,
        both(rows("joined", 1), put("joined_seq_lens", 2)),
        "joined has row 1, which is steady",
    ),
    "joined length": (2, put("joined_seq_lens", 16), "joined_seq_lens has 1 values"),
    "steady negative": (
        2,
        put("joined_seq_lens", 16, -1),
        r"steady seq_lens has -1: must be in \[0, 128\)",
    ),
    "steady too long": (
        2,
        put("joined_seq_lens", 16, 128),
        r"steady seq_lens has 128: must be in \[0, 128\)",
    ),
    "steady ids": (2, put("steady_ids", 1), "steady_ids has 1 values, the steady rows has 2"),
    "steady id": (2, put("steady_ids", 1, 4096), r"steady_ids has 4096: must be in \[0, 4096\)"),
    "steady samples": (2, put("steady_samples", 0, 0), "steady_samples came"),
    "no sample": (
        3,
        both(rows("joined", 0), put("joined_seq_lens", 0), NOTHING),
        "steady_ids is empty, but row 0 has no sample in the step before",
    ),
    "rows, unknown": (3, rows("rows", 3), "rows has row 3, which no sequence has"),
    "rows twice": (1, rows("rows", 0, 0), "rows has 2 rows, not all different"),
    "rows, steady": (3, rows("rows", 1), "rows has row 1, which is steady"),
    "seq_lens length": (3, put("seq_lens"), "seq_lens has 0 values, delta.rows has 1"),
    "seq_lens negative": (3, put("seq_lens", -1), r"seq_lens has -1: must be in \[0, 129\)"),
    "query_lens length": (3, put("query_lens"), "query_lens has 0 values, delta.rows has 1"),
    "query_lens zero": (3, put("query_lens", 0), r"query_lens has 0: must be in \[1, 129\)"),
    "query_lens sum": (3, put("query_lens", 2), "query_lens sum to 2, input_ids has 1 tokens"),
    "too long": (3, put("seq_lens", 128), r"seq_lens \+ query_lens has 129: must be in"),
    "samples length": (3, put("samples", dtype="u1"), r"samples \[\] must be 0 or 1"),
    "samples": (3, put("samples", 2, dtype="u1"), r"samples \[2\] must be 0 or 1"),
    "token id": (3, put("input_ids", 4096), r"input_ids has 4096: must be in \[0, 4096\)"),
    "token id negative": (3, put("input_ids", -3), "input_ids has -3"),
    "tokens of nobody": (2, put("input_ids", 1), "input_ids has 4 bytes, delta.rows is empty"),
    "nobody": (3, both(rows("left", 0, 1), NOTHING), "neither steady nor other rows"),
    "score_index": (3, put("score_index", 2), r"score_index has 2: must be in \[0, 2\)"),
    "score_token_ids": (3, put("score_token_ids", 1), "score_token_ids has 1 values"),
    "score_num_tops": (3, put("score_num_tops", 1), "score_num_tops has 1 values"),
} | {
    f"added {name}": (3, column(name, value, dtype=dtype), f"sampling.{name} .* must be in")
    for name, (value, dtype) in COLUMNS.items()
}


@pytest.mark.parametrize(("step_id", "change", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_delta_is_refused_and_its_array_named(
    step_id: int, change: Change, message: str
) -> None:
    requests = make_requests()
    change(requests[step_id - 1].delta)
    with pytest.raises(StepError, match=message):
        decode_all(requests[:step_id])


@pytest.mark.parametrize(
    ("shared", "message"),
    [({}, r"samples of step 1 are fed: they are kept of \[\]"), ({2: 2}, r"kept of \[2\]")],
)
def test_samples_must_be_shared(shared: dict[int, int], message: str) -> None:
    decoder = DeltaDecoder()
    first, second, _ = make_requests()
    decoder.decode(first, LIMITS)
    with pytest.raises(StepError, match=message):
        decoder.decode(second, LIMITS, shared)


def test_a_delta_needs_the_step_before_it() -> None:
    first, second, third = make_requests()
    decoder = DeltaDecoder()
    with pytest.raises(OutOfOrderError, match=r"step 2 came as a delta .* none of which is known"):
        decoder.decode(second, LIMITS, SHARED)
    decoder.decode(first, LIMITS, SHARED)
    with pytest.raises(
        OutOfOrderError, match=r"step 3 came as a delta .* step 1 is the last known"
    ):
        decoder.decode(third, LIMITS, SHARED)


def test_after_a_refusal_only_a_keyframe_is_taken() -> None:
    first, second, _ = make_requests()
    bad = make_requests()[1]
    table("block_ids", 32)(bad.delta)
    decoder = DeltaDecoder()
    decoder.decode(first, LIMITS, SHARED)
    with pytest.raises(StepError, match="block_ids"):
        decoder.decode(bad, LIMITS, SHARED)
    with pytest.raises(OutOfOrderError, match=r"step 2 came as a delta"):
        decoder.decode(second, LIMITS, SHARED)
    decoder.decode(first, LIMITS, SHARED)
    decoder.decode(second, LIMITS, SHARED)


def test_a_whole_step_ends_a_series() -> None:
    """The worker's rows know nothing of it."""
    model = FakeModel()
    first, second, third = make_requests(is_checked=True)
    whole = worker_pb2.StepRequest(
        epoch=EPOCH, step_id=2, share_samples=True, plan=second.checked_plan
    )
    with ready_worker(model) as client, pytest.raises(Exception, match=r"step 1 is the last known"):
        client.execute(first, whole, third)


def test_a_worker_runs_deltas() -> None:
    model = FakeModel()
    with ready_worker(model) as client:
        replies = client.execute(*make_requests(is_checked=True))
    assert [reply.step_id for reply in replies] == [1, 2, 3]
    assert [batch.sequence_ids for batch in model.batches] == [(7, 8), (7, 8), (8, 9)]


def test_what_differs_from_the_whole_step_is_named() -> None:
    first, second, third = make_requests(is_checked=True)
    decode_all([first, second, third])
    second.delta.joined_seq_lens = np.array([16, 4], "<i4").tobytes()
    with pytest.raises(
        StepError, match=r"^step 2, by its delta and as a whole: positions\[1\] is 4 and 2$"
    ):
        decode_all([first, second])


@contextmanager
def connected(model: FakeModel, *, check_deltas: bool) -> Iterator[GrpcExecutor]:
    with ready_worker(model) as client:
        executor = GrpcExecutor(
            [client.channel],
            token=TOKEN,
            epoch=EPOCH,
            deadlines=StepDeadlines(TIMEOUT_S),
            check_ranks=False,
            share_samples=True,
            on_broken=lambda rank, cause: None,
            check_deltas=check_deltas,
        )
        try:
            yield executor
        finally:
            executor.close()


@pytest.mark.parametrize("check_deltas", [False, True])
def test_an_executor_sends_deltas(check_deltas: bool) -> None:
    """Nobody looks at a plan's tables, unless they are to be compared."""
    model = FakeModel()
    with connected(model, check_deltas=check_deltas) as executor:
        for plan in make_plans():
            executor.submit(plan if check_deltas else replace(plan, block_tables=()))
        results = [executor.result() for _ in range(3)]
    assert [result.sequence_ids for result in results] == [[7, 8], [7, 8], [8, 9]]
    assert model.batches[1].block_tables[0].block_ids.tolist() == [[3, 5], [4, 0]]


def test_an_executor_lets_ranks_compare() -> None:
    first, second, _ = make_plans()
    second = replace(second, seq_lens=ints(16, 4), positions=ints(16, 4))
    with connected(FakeModel(), check_deltas=True) as executor:
        executor.submit(first)
        executor.submit(second)
        executor.result()
        with pytest.raises(
            WorkerError, match=r"step 2, by its delta .*: positions\[1\] is 2 and 4"
        ):
            executor.result()


def leaves(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths to all that is no dataclass and no tuple of them."""
    if is_dataclass(value):
        parts = [(each.name, getattr(value, each.name)) for each in fields(value)]
    elif isinstance(value, tuple) and value and is_dataclass(value[0]):
        parts = list(enumerate(value))
    else:
        return [path]
    return [leaf for name, part in parts for leaf in leaves(part, (*path, name))]


def altered(value: object, path: tuple[str | int, ...]) -> object:
    """With another value at `path`."""
    if not path:
        if isinstance(value, torch.Tensor):
            return torch.cat((value.reshape(-1), value.new_ones(1)))
        return (*value, 1) if isinstance(value, tuple) else value + 1
    name, *rest = path
    if isinstance(value, tuple):
        parts = list(value)
        parts[name] = altered(parts[name], tuple(rest))
        return tuple(parts)
    return replace(value, **{name: altered(getattr(value, name), tuple(rest))})


def test_a_difference_in_any_field_is_found() -> None:
    batch = decode_all(make_requests())[2]
    paths = leaves(batch)
    assert len(paths) > 30
    for path in paths:
        name = ".".join(map(str, path)).replace(".0.", "[0].")
        found = find_difference(batch, altered(batch, path))
        assert found is not None, name
        assert found.startswith(name), found
