"""The Worker service over a real socket, with a fake model behind it."""

import gc
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import worker_pb2
from runtime.executor.codec import decode_result, encode_sample, encode_step
from runtime.scheduling.sampler_inputs import no_inputs
from runtime.scheduling.token_masks import MaskKind, TokenMasks
from tests.transport import (
    EPOCH,
    TIMEOUT_S,
    Client,
    FakeModel,
    example_plan,
    ints,
    ready_worker,
    running_worker,
)
from workers.collector import freeze_heap
from workers.errors import CacheError, ModelError
from workers.server import SERVICE_NAME, UNCLAIMED_NAME

pytestmark = pytest.mark.wire

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def step(step_id: int, *, epoch: int = EPOCH, **changes: Any) -> worker_pb2.StepRequest:
    data = encode_step(example_plan(step_id, **changes), epoch=epoch, return_input_hash=False)
    return worker_pb2.StepRequest.FromString(data)


def raising(error: Exception) -> Callable[[], None]:
    def hook() -> None:
        raise error

    return hook


def health_of(client: Client, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    stub = health_pb2_grpc.HealthStub(client.channel)
    reply = stub.Check(request, timeout=TIMEOUT_S, metadata=client.metadata)
    return int(reply.status)


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refused:
        call()
    return refused.value.code(), refused.value.details()


@pytest.mark.parametrize("token", [None, "another"])
def test_a_stranger_is_refused_everywhere(token: str | None) -> None:
    model = FakeModel()
    with running_worker(model) as (client, server):
        stranger = Client(client.channel, token)
        calls = [
            stranger.open_rendezvous,
            stranger.initialize,
            stranger.allocate_cache,
            lambda: stranger.execute(step(1)),
            stranger.shutdown,
            lambda: health_of(stranger, ""),
        ]
        codes = {refusal(call)[0] for call in calls}

        assert codes == {grpc.StatusCode.UNAUTHENTICATED}
        assert not server.stopped.is_set()
        assert model.threads == set()


def test_graphs_are_told_as_they_are_captured() -> None:
    """Those of an instant in one message."""
    with running_worker(FakeModel(num_graphs=9)) as (client, _):
        client.initialize()
        cache = client.allocate_cache()

    assert cache.cache_bytes == 3200
    assert client.captures[-1] == (9, 9)
    assert len(client.captures) < 9


def test_a_worker_loads_and_runs_steps() -> None:
    model = FakeModel()
    with running_worker(model) as (client, _):
        replies = client.initialize()
        cache = client.allocate_cache()
        steps = client.execute(step(1), step(2))

    assert replies[-1].spec.architecture == "FakeForCausalLM"
    assert len(replies[-1].spec.layers) == 2
    last = replies[-2].progress
    assert (last.loaded_bytes, last.total_bytes) == (1000, 1000)
    # Eleven reports came within an instant: the first and the last are worth a message.
    assert len(replies) < 11
    assert cache.cache_bytes == 3200
    assert [reply.step_id for reply in steps] == [1, 2]
    result = decode_result(steps[0])
    assert result.sequence_ids == [2**64 - 1, 12]
    assert result.token_ids == [1199, 346]
    assert (steps[0].timings.forward_us, steps[0].timings.sample_us) == (11, 5)


def test_a_worker_is_to_be_had_until_its_first_call() -> None:
    with running_worker(FakeModel()) as (client, _):
        before = health_of(client, UNCLAIMED_NAME)
        client.open_rendezvous()
        assert (before, health_of(client, UNCLAIMED_NAME)) == (SERVING, NOT_SERVING)


def test_a_claim_without_a_renewal_runs_out() -> None:
    expired = threading.Event()
    options = {"first_lease_s": 0.1, "on_expired": expired.set}
    with running_worker(FakeModel(), **options) as (client, _):
        assert not expired.wait(0.5), "nobody has claimed it yet"
        client.open_rendezvous()
        assert expired.wait(TIMEOUT_S)


def test_tokens_come_in_the_order_of_the_sampled_rows() -> None:
    with ready_worker(FakeModel()) as client:
        reply = client.execute(step(1, sample_index=ints(4, 3), sample_sequence=ints(1, 0)))[0]

    result = decode_result(reply)
    assert result.sequence_ids == [12, 2**64 - 1]
    assert result.token_ids == [346, 1199]


def test_copies_reach_the_model_with_their_step() -> None:
    model = FakeModel()
    copies = np.array([[5, 9], [9, 10]], np.int32)
    with ready_worker(model) as client:
        client.execute(step(1), step(2, block_copies=copies))

    assert [batch.block_copies.tolist() for batch in model.batches] == [[], [[5, 9], [9, 10]]]


def test_only_rank_0_returns_tokens() -> None:
    with ready_worker(FakeModel(), rank=1, tp_size=2) as client:
        reply = client.execute(step(1))[0]

    assert not reply.HasField("result")
    assert not reply.HasField("input_hash")


def test_the_device_has_one_thread() -> None:
    model = FakeModel()
    with running_worker(model) as (client, server):
        client.open_rendezvous()
        client.initialize(tp_size=2)
        client.allocate_cache()
        client.execute(step(1), step(2))
        client.shutdown()
        assert server.stopped.wait(TIMEOUT_S)

    assert len(model.threads) == 1


def test_health_answers_while_a_step_runs() -> None:
    model = FakeModel()
    with running_worker(model) as (client, _):
        before = health_of(client, SERVICE_NAME)
        client.initialize()
        client.allocate_cache()
        model.gate.clear()
        running = client.stub.Execute(iter([step(1)]), timeout=TIMEOUT_S, metadata=client.metadata)
        assert model.started.wait(TIMEOUT_S)
        during = health_of(client, ""), health_of(client, SERVICE_NAME)
        model.gate.set()

        assert next(running).step_id == 1
    assert before == NOT_SERVING
    assert during == (SERVING, SERVING)


def test_a_model_that_cannot_be_served_is_a_failed_precondition() -> None:
    model = FakeModel(on_load=raising(ModelError("tp=3 must divide num_heads=4")))
    with running_worker(model) as (client, _):
        assert refusal(client.initialize) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "tp=3 must divide num_heads=4",
        )


def test_the_device_goes_on_while_a_reply_waits_for_it() -> None:
    """On a GPU a step's ids come later than its launch: the next one is launched meanwhile."""
    second_began = threading.Event()
    waited: list[bool] = []

    class Late(FakeModel):
        def forward(self, batch: Any) -> Any:
            fed = super().forward(batch)
            if len(self.batches) == 2:
                second_began.set()
            return fed

        def sample(self, late: Any = None) -> Any:
            sampled = super().sample(late)
            return lambda: (waited.append(second_began.wait(TIMEOUT_S)), sampled())[1]

    with ready_worker(Late()) as client:
        replies = client.execute(step(1), step(2))

    assert waited == [True, True]
    assert [reply.step_id for reply in replies] == [1, 2]


def test_an_exception_while_loading_names_type_and_rank() -> None:
    model = FakeModel(on_load=raising(KeyError("norm.weight")))
    with running_worker(model) as (client, _):
        assert refusal(lambda: client.initialize(rank=1, tp_size=2)) == (
            grpc.StatusCode.INTERNAL,
            "KeyError on rank 1: 'norm.weight'",
        )


def test_a_cache_that_does_not_fit_may_be_asked_for_again() -> None:
    model = FakeModel(on_allocate=raising(CacheError("9 GiB is more than 1 GiB")))
    with running_worker(model) as (client, _):
        client.initialize()

        first = refusal(client.allocate_cache)
        model.on_allocate = lambda: None

        assert first == (grpc.StatusCode.RESOURCE_EXHAUSTED, "9 GiB is more than 1 GiB")
        assert client.allocate_cache().cache_bytes == 3200


def test_a_worker_settles_once_when_model_and_cache_are_there() -> None:
    calls: list[str] = []
    model = FakeModel(
        on_load=lambda: calls.append("load"),
        on_allocate=raising(CacheError("9 GiB is more than 1 GiB")),
        on_settle=lambda: calls.append("settle"),
        on_step=lambda: calls.append("step"),
    )
    with running_worker(model) as (client, _):
        client.initialize()
        refusal(client.allocate_cache)
        model.on_allocate = lambda: calls.append("allocate")
        client.allocate_cache()
        client.execute(step(1))

    assert calls == ["load", "allocate", "settle", "step"]


def test_the_collector_never_walks_what_was_there_when_the_heap_was_frozen() -> None:
    try:
        freeze_heap()
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 10_000
    finally:
        gc.unfreeze()


def test_calls_out_of_order_are_refused() -> None:
    with running_worker(FakeModel()) as (client, _):
        early_cache = refusal(client.allocate_cache)
        client.initialize()
        again = refusal(client.initialize)
        other_epoch = refusal(lambda: client.allocate_cache(epoch=EPOCH + 1))
        early_step = refusal(lambda: client.execute(step(1)))

    assert early_cache[1] == "AllocateCache came before Initialize was through"
    assert again[1] == "Initialize was called before: a worker does it once"
    assert other_epoch[1] == "epoch 4 came, this worker is of epoch 3"
    assert early_step[1] == "a step came before AllocateCache"
    codes = {code for code, _ in (early_cache, again, other_epoch, early_step)}
    assert codes == {grpc.StatusCode.ABORTED}


@pytest.mark.parametrize(
    ("requests", "code", "message"),
    [
        (
            [step(2)],
            grpc.StatusCode.ABORTED,
            "step_id 2 came, 1 was expected",
        ),
        (
            [step(1), step(1)],
            grpc.StatusCode.ABORTED,
            "step_id 1 came, 2 was expected",
        ),
        (
            [step(1, epoch=9)],
            grpc.StatusCode.ABORTED,
            "epoch 9 came, this worker is of epoch 3",
        ),
        (
            [worker_pb2.StepRequest(epoch=EPOCH, step_id=1)],
            grpc.StatusCode.INVALID_ARGUMENT,
            "step 1: neither plan, delta nor sample came, must be one of them",
        ),
        (
            [step(1, positions=example_plan().positions[:3])],
            grpc.StatusCode.INVALID_ARGUMENT,
            "positions has 3 values, input_ids has 5: must be equal",
        ),
    ],
)
def test_a_wrong_step_ends_the_stream_and_all_later_ones(
    requests: list[worker_pb2.StepRequest], code: grpc.StatusCode, message: str
) -> None:
    with ready_worker(FakeModel()) as client:
        first = refusal(lambda: client.execute(*requests))
        second = refusal(lambda: client.execute(step(1)))

        assert first == (code, message)
        assert second[0] is grpc.StatusCode.ABORTED
        assert message in second[1]
        assert health_of(client, SERVICE_NAME) == NOT_SERVING


def test_what_is_not_built_is_unimplemented() -> None:
    request = step(1)
    request.plan.block_ops.add(kind=worker_pb2.BlockOp.KIND_UNSPECIFIED)
    with ready_worker(FakeModel()) as client:
        code, message = refusal(lambda: client.execute(request))

    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "block_ops" in message


def test_plans_may_come_before_the_samples_of_steps_before_them() -> None:
    model = FakeModel()
    with ready_worker(model) as client:
        replies = client.execute(
            step(1, defer_sampling=True),
            step(2, defer_sampling=True),
            step(3),
            masks_for(1),
            masks_for(2, row=0),
        )

    assert [reply.step_id for reply in replies] == [1, 2, 3]
    assert [each.rows.tolist() for each in model.masks] == [[1], [0], []]


def test_a_stream_that_ends_before_a_deferred_step_is_whole_ends() -> None:
    with ready_worker(FakeModel()) as client:
        replies = client.execute(step(1), step(2, defer_sampling=True))

    assert [reply.step_id for reply in replies] == [1]


def test_inputs_that_come_too_early_are_refused() -> None:
    request = step(1, defer_sampling=True)
    request.sampler_inputs.SetInParent()
    with ready_worker(FakeModel()) as client:
        code, message = refusal(lambda: client.execute(request))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampler_inputs came with a plan that defers sampling" in message


def masks_for(step_id: int, *, row: int = 1, token_ids: Sequence[int] = (7, 9)) -> Any:
    masks = TokenMasks(
        rows=ints(row),
        kinds=np.array([MaskKind.ALLOWED], np.uint8),
        num_words=ints(len(token_ids)),
        words=np.array(token_ids, np.uint32),
    )
    data = encode_sample(no_inputs(), masks, epoch=EPOCH, step_id=step_id)
    return worker_pb2.StepRequest.FromString(data)


def test_a_deferred_step_is_sampled_when_its_masks_come() -> None:
    model = FakeModel()
    with ready_worker(model) as client:
        replies = client.execute(
            step(1, defer_sampling=True),
            masks_for(1),
            step(2),
            step(3, defer_sampling=True),
            masks_for(3),
        )

    assert [reply.step_id for reply in replies] == [1, 2, 3]
    assert decode_result(replies[0]).token_ids == [1199, 346]
    assert [each.rows.tolist() for each in model.masks] == [[1], [], [1]]
    assert model.masks[0].words.tolist() == [7, 9]
    assert model.masks[0].kinds.tolist() == [MaskKind.ALLOWED]


def test_a_rank_that_samples_nothing_replies_to_a_deferred_step_at_once() -> None:
    with ready_worker(FakeModel(), rank=1, tp_size=2) as client:
        replies = client.execute(step(1, defer_sampling=True), step(2))

    assert [reply.step_id for reply in replies] == [1, 2]
    assert not any(reply.HasField("result") for reply in replies)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([masks_for(1)], "step 1: sample came, which no step with that id waits for"),
        (
            [step(1, defer_sampling=True), masks_for(2)],
            "step 2: sample came, which no step with that id waits for",
        ),
        (
            [step(1, defer_sampling=True), step(2, defer_sampling=True), masks_for(2)],
            "step 2: sample came, which no step with that id waits for",
        ),
        (
            [step(1, defer_sampling=True), masks_for(1, row=2)],
            r"sample.masks.rows has 2: must be in \[0, 2\)",
        ),
        (
            [step(1, defer_sampling=True), masks_for(1, token_ids=[4096])],
            r"sample.masks.words has 4096: must be in \[0, 4096\)",
        ),
    ],
)
def test_masks_out_of_order_or_of_no_row_are_refused(
    requests: list[worker_pb2.StepRequest], message: str
) -> None:
    with ready_worker(FakeModel()) as client:
        code, found = refusal(lambda: client.execute(*requests))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert re.fullmatch(message, found)


def test_a_step_that_raises_is_internal_and_names_type_and_rank() -> None:
    model = FakeModel(on_step=raising(ZeroDivisionError("by zero")))
    with ready_worker(model, rank=1, tp_size=2) as client:
        first = refusal(lambda: client.execute(step(1)))
        second = refusal(lambda: client.execute(step(2)))

    assert first == (grpc.StatusCode.INTERNAL, "ZeroDivisionError on rank 1: by zero")
    assert second[0] is grpc.StatusCode.ABORTED


def test_a_second_stream_is_refused_and_harms_no_first() -> None:
    with ready_worker(FakeModel()) as client:
        more = threading.Event()

        def requests() -> Any:
            yield step(1)
            more.wait(TIMEOUT_S)
            yield step(2)

        first = client.stub.Execute(requests(), timeout=TIMEOUT_S, metadata=client.metadata)
        assert next(first).step_id == 1
        second = refusal(lambda: client.execute(step(2)))
        more.set()

        assert second[1] == "Execute was called before: a worker does it once"
        assert next(first).step_id == 2


def test_shutdown_is_answered_while_the_device_hangs() -> None:
    model = FakeModel()
    with running_worker(model) as (client, server):
        client.initialize()
        client.allocate_cache()
        model.gate.clear()
        # Kept: gRPC cancels a call that nobody holds.
        hanging = client.stub.Execute(iter([step(1)]), timeout=TIMEOUT_S, metadata=client.metadata)
        assert model.started.wait(TIMEOUT_S)

        client.shutdown()

        assert server.stopped.wait(TIMEOUT_S)
        assert hanging.is_active()
        assert not model.gate.is_set()
