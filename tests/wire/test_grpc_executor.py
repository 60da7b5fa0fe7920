"""The driver's streams to the ranks: in lockstep, or with an error that says who and why."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import torch

from protos import worker_pb2
from runtime.errors import WorkerError
from runtime.executor.codec import encode_step
from runtime.executor.deadlines import StepDeadlines
from runtime.executor.grpc_executor import EXECUTE, GrpcExecutor
from tests.steps import execute
from tests.transport import (
    EPOCH,
    TIMEOUT_S,
    TOKEN,
    FakeModel,
    example_plan,
    ints,
    ready_worker,
    result_of,
)
from workers.batch import Batch

pytestmark = pytest.mark.wire

PROMPT_S = 5.0  # far below every deadline here

Answer = Callable[[worker_pb2.StepRequest], worker_pb2.StepReply]


class ScriptedRank:
    """A rank that answers each step as it is told to."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.received: list[bytes] = []

    def execute(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        for message in messages:
            self.received.append(message)
            yield self.answer(worker_pb2.StepRequest.FromString(message)).SerializeToString()


@contextmanager
def scripted(*ranks: ScriptedRank) -> Iterator[list[grpc.Channel]]:
    with ExitStack() as stack:
        channels = []
        for rank in ranks:
            server = grpc.server(ThreadPoolExecutor(2))
            name, method = EXECUTE.strip("/").split("/")
            handler = grpc.stream_stream_rpc_method_handler(rank.execute)
            server.add_generic_rpc_handlers(
                [grpc.method_handlers_generic_handler(name, {method: handler})]
            )
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            stack.callback(lambda server=server: server.stop(None).wait())
            channels.append(stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}")))
        yield channels


@contextmanager
def executing(
    channels: list[grpc.Channel],
    *,
    step_timeout_s: float = TIMEOUT_S,
    check_ranks: bool = False,
    on_broken: Callable[[int, str], None] = lambda rank, cause: None,
) -> Iterator[GrpcExecutor]:
    executor = GrpcExecutor(
        channels,
        token=TOKEN,
        epoch=EPOCH,
        deadlines=StepDeadlines(step_timeout_s),
        check_ranks=check_ranks,
        share_samples=False,
        on_broken=on_broken,
    )
    try:
        yield executor
    finally:
        executor.close()


def answer(request: worker_pb2.StepRequest, **changes: Any) -> worker_pb2.StepReply:
    fields = {
        "epoch": request.epoch,
        "step_id": request.step_id,
        "result": result_of({5: 10}),
        **changes,
    }
    return worker_pb2.StepReply(**fields)


def never(ended: threading.Event) -> Answer:
    def hang(request: worker_pb2.StepRequest) -> worker_pb2.StepReply:
        ended.wait(TIMEOUT_S)
        return answer(request)

    return hang


def failing(request: worker_pb2.StepRequest) -> worker_pb2.StepReply:
    raise ZeroDivisionError("by zero")


def test_two_ranks_run_steps_and_rank_0_answers() -> None:
    models = FakeModel(), FakeModel()
    with ExitStack() as stack:
        clients = [
            stack.enter_context(ready_worker(model, rank=rank, tp_size=2))
            for rank, model in enumerate(models)
        ]
        channels = [client.channel for client in clients]
        executor = stack.enter_context(executing(channels, check_ranks=True))

        results = [execute(executor, example_plan(step_id)) for step_id in (1, 2, 3)]

    assert [result.step_id for result in results] == [1, 2, 3]
    assert results[0].sequence_ids == [2**64 - 1, 12]
    assert results[0].token_ids == [1199, 346]
    assert [len(model.batches) for model in models] == [3, 3]


def test_every_rank_gets_the_same_bytes() -> None:
    ranks = ScriptedRank(answer), ScriptedRank(answer)
    with scripted(*ranks) as channels, executing(channels) as executor:
        execute(executor, example_plan(1))

    expected = encode_step(example_plan(1), epoch=EPOCH, return_input_hash=False)
    assert [rank.received for rank in ranks] == [[expected], [expected]]


def test_ranks_that_ran_different_inputs_are_found() -> None:
    ranks = [
        ScriptedRank(lambda request: answer(request, input_hash=1)),
        ScriptedRank(lambda request: answer(request, input_hash=2)),
    ]
    with (
        scripted(*ranks) as channels,
        executing(channels, check_ranks=True) as executor,
        pytest.raises(WorkerError, match=r"ranks 0 and 1 disagree in step 1: .*0001 and .*0002"),
    ):
        execute(executor, example_plan(1))


class StrayModel(FakeModel):
    """Feeds another token than the other ranks from its third step on."""

    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch) + (batch.step_id >= 3)


def test_a_rank_that_feeds_another_token_ends_the_epoch() -> None:
    models = FakeModel(), FakeModel(), StrayModel()
    with ExitStack() as stack:
        clients = [
            stack.enter_context(ready_worker(model, rank=rank, tp_size=3))
            for rank, model in enumerate(models)
        ]
        channels = [client.channel for client in clients]
        executor = stack.enter_context(executing(channels, check_ranks=True))
        for step_id in (1, 2):
            execute(executor, example_plan(step_id))
        for _ in range(2):
            with pytest.raises(WorkerError, match=r"^ranks 0 and 2 disagree in step 3: "):
                execute(executor, example_plan(3))


def test_a_missing_hash_is_no_agreement() -> None:
    ranks = ScriptedRank(lambda request: answer(request, input_hash=1)), ScriptedRank(answer)
    with (
        scripted(*ranks) as channels,
        executing(channels, check_ranks=True) as executor,
        pytest.raises(WorkerError, match="rank 1 returned no input hash for step 1"),
    ):
        execute(executor, example_plan(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_id": 7}, "rank 1 replied to step 7 of epoch 3 instead of step 1 of epoch 3"),
        ({"epoch": 9}, "rank 1 replied to step 1 of epoch 9 instead of step 1 of epoch 3"),
    ],
)
def test_a_reply_out_of_step_is_refused(changes: dict[str, int], message: str) -> None:
    ranks = ScriptedRank(answer), ScriptedRank(lambda request: answer(request, **changes))
    with (
        scripted(*ranks) as channels,
        executing(channels) as executor,
        pytest.raises(WorkerError, match=message),
    ):
        execute(executor, example_plan(1))


def test_rank_0_must_have_a_result() -> None:
    rank = ScriptedRank(lambda request: answer(request, result=None))
    with (
        scripted(rank) as channels,
        executing(channels) as executor,
        pytest.raises(WorkerError, match="rank 0 replied to step 1 without a result"),
    ):
        execute(executor, example_plan(1))


def test_rank_0_must_have_one_token_for_each_row() -> None:
    result = result_of({5: 10, 6: 11})
    result.num_tokens = ints(1, 2).tobytes()
    rank = ScriptedRank(lambda request: answer(request, result=result))
    with (
        scripted(rank) as channels,
        executing(channels) as executor,
        pytest.raises(WorkerError, match="step 1 with a malformed result: num_tokens has 2: must"),
    ):
        execute(executor, example_plan(1))


def test_a_broken_stream_is_reported_while_another_rank_hangs() -> None:
    ended = threading.Event()
    ranks = ScriptedRank(never(ended)), ScriptedRank(failing)
    with scripted(*ranks) as channels, executing(channels) as executor:
        before = time.monotonic()
        with pytest.raises(WorkerError, match=r"step 1 failed: rank 1: UNKNOWN: .*by zero"):
            execute(executor, example_plan(1))
        took = time.monotonic() - before
        ended.set()

    assert took < PROMPT_S


def test_a_late_rank_is_named() -> None:
    ended = threading.Event()
    ranks = ScriptedRank(answer), ScriptedRank(never(ended))
    with scripted(*ranks) as channels, executing(channels, step_timeout_s=0.5) as executor:
        with pytest.raises(WorkerError, match=r"rank 1 did not reply to step 1 within 0\.5 s"):
            execute(executor, example_plan(1))
        ended.set()


def test_no_step_follows_a_failed_one() -> None:
    rank = ScriptedRank(failing)
    with scripted(rank) as channels, executing(channels) as executor:
        with pytest.raises(WorkerError):
            execute(executor, example_plan(1))
        with pytest.raises(WorkerError, match="step 1 failed: rank 0"):
            execute(executor, example_plan(2))

    assert len(rank.received) == 1


def test_a_refused_step_carries_the_ranks_words() -> None:
    with ready_worker(FakeModel()) as client, executing([client.channel]) as executor:
        plan = example_plan(1, positions=example_plan().positions[:3])
        with pytest.raises(WorkerError, match="INVALID_ARGUMENT: positions has 3 values"):
            execute(executor, plan)


def test_a_death_known_while_idle_fails_the_next_step() -> None:
    ended = threading.Event()
    with scripted(ScriptedRank(never(ended))) as channels, executing(channels) as executor:
        executor.fail(0, "exit code 1")
        with pytest.raises(WorkerError, match="step 1 failed: rank 0: exit code 1"):
            execute(executor, example_plan(1))
        ended.set()


def test_a_stream_that_breaks_while_idle_is_reported() -> None:
    heard: SimpleQueue[tuple[int, str]] = SimpleQueue()

    class LeavingRank(ScriptedRank):
        def execute(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            yield self.answer(worker_pb2.StepRequest.FromString(next(messages))).SerializeToString()
            left.wait(TIMEOUT_S)

    left = threading.Event()
    with (
        scripted(LeavingRank(answer)) as channels,
        executing(channels, on_broken=lambda *what: heard.put(what)) as executor,
    ):
        execute(executor, example_plan(1))
        assert heard.empty()
        left.set()
        assert heard.get(timeout=TIMEOUT_S) == (0, "it ended its stream")


def test_what_the_executor_ends_itself_is_no_loss() -> None:
    heard: list[tuple[int, str]] = []
    with scripted(ScriptedRank(answer)) as channels:
        with executing(channels, on_broken=lambda *what: heard.append(what)) as executor:
            execute(executor, example_plan(1))
        with pytest.raises(WorkerError):
            execute(executor, example_plan(2))
    assert heard == []


def test_close_ends_a_running_step_and_may_be_called_twice() -> None:
    model = FakeModel()
    model.gate.clear()
    failures: list[WorkerError] = []

    def run(executor: GrpcExecutor) -> None:
        with pytest.raises(WorkerError) as failure:
            execute(executor, example_plan(1))
        failures.append(failure.value)

    with ready_worker(model) as client, executing([client.channel]) as executor:
        thread = threading.Thread(target=run, args=(executor,))
        thread.start()
        assert model.started.wait(TIMEOUT_S)
        executor.close()
        executor.close()
        thread.join(PROMPT_S)
        assert not thread.is_alive()

    assert "the executor was closed" in str(failures[0])
