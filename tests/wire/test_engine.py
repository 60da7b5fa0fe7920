"""The engine over the oracle: threads, connections, refusals, the end."""

import threading
from collections import defaultdict
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from runtime.engine import Engine
from runtime.errors import InvalidRequestError, LockstepError, UnavailableError, WorkerError
from runtime.request import FinishReason, ModelInfo, Request, RequestFailure, RequestOutput
from runtime.scheduling.step_plan import StepPlan, StepResult
from runtime.structured import NoCompiler
from tests.params import complete_params
from tests.scheduling import EOS, VOCAB_SIZE, OracleExecutor, make_scheduler, oracle_continuation
from tests.served import DEPTH

if TYPE_CHECKING:
    from runtime.connection import Connection

pytestmark = pytest.mark.wire


class Client:
    """Collects what its connection brings."""

    def __init__(self, engine: Engine) -> None:
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.ends: SimpleQueue[tuple[int, FinishReason | LockstepError]] = SimpleQueue()
        self.connection: Connection = engine.connect(self._sink)

    def add(self, request_id: int, prompt: list[int], *, max_tokens: int = 8) -> None:
        params = complete_params(max_tokens=max_tokens)
        self.connection.add(
            Request(request_id=request_id, prompt_token_ids=prompt, params=params, seed=request_id)
        )

    def wait(self, count: int = 1) -> dict[int, FinishReason | LockstepError]:
        return dict(self.ends.get(timeout=30) for _ in range(count))

    def _sink(self, outputs: list[RequestOutput | RequestFailure]) -> None:
        for output in outputs:
            if isinstance(output, RequestFailure):
                self.ends.put((output.request_id, output.error))
                continue
            self.tokens[output.request_id].extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends.put((output.request_id, output.finish_reason))


class GatedExecutor(OracleExecutor):
    """Holds each step back until it's let through."""

    def __init__(self, layout) -> None:
        super().__init__(layout)
        self.entered: SimpleQueue[None] = SimpleQueue()
        self.gate: SimpleQueue[Exception | None] = SimpleQueue()

    def execute(self, plan: StepPlan, masks=None) -> StepResult:
        self.entered.put(None)
        error = self.gate.get(timeout=30)
        if error is not None:
            raise error
        return super().execute(plan, masks)

    def step(self, error: Exception | None = None) -> None:
        self.entered.get(timeout=30)
        self.gate.put(error)


def make_engine(
    executor_class=OracleExecutor, depth=DEPTH, **scheduler_options
) -> tuple[Engine, OracleExecutor]:
    scheduler = make_scheduler(**scheduler_options)
    executor = executor_class(scheduler.cache.layout)
    model = ModelInfo(
        name="oracle",
        path="",
        architecture="Oracle",
        vocab_size=VOCAB_SIZE,
        max_model_len=scheduler.limits.max_model_len,
        eos_token_ids=(EOS,),
        tp_size=1,
    )
    return Engine(
        model=model,
        scheduler=scheduler,
        compiler=NoCompiler("a test has no tokenizer"),
        executor=executor,
        depth=depth,
    ), executor


@pytest.fixture
def engine():
    engine, _ = make_engine()
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(params=[1, 2, 3])
def gated(request):
    engine, executor = make_engine(GatedExecutor, depth=request.param)
    engine.start()
    yield engine, executor
    engine.fail(UnavailableError("the test is over"))
    executor.gate.put(WorkerError("the test is over"))
    engine.stop()


def test_two_connections_may_use_the_same_ids(engine: Engine) -> None:
    one, two = Client(engine), Client(engine)
    one.add(1, [1, 2, 3])
    two.add(1, [4, 5])
    assert set(one.wait().values()) <= set(FinishReason)
    two.wait()
    assert one.tokens[1] == oracle_continuation([1, 2, 3], max_tokens=8, seed=1)
    assert two.tokens[1] == oracle_continuation([4, 5], max_tokens=8, seed=1)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 8, "prompt is empty"),
        ([1, VOCAB_SIZE], 8, rf"token id {VOCAB_SIZE} must be in \[0, {VOCAB_SIZE}\)"),
        ([1, -1], 8, "token id -1 must be in"),
        ([1] * 250, 8, "prompt of 250 tokens .* max_tokens=8 is 258 .* max_model_len=256"),
        ([1], 300, "max_model_len=256"),
    ],
)
def test_a_bad_request_is_refused_and_harms_nobody(
    engine: Engine, prompt: list[int], max_tokens: int, message: str
) -> None:
    client = Client(engine)
    client.add(1, [1, 2, 3], max_tokens=40)
    client.add(2, prompt, max_tokens=max_tokens)
    ends = client.wait(2)
    assert isinstance(ends[2], InvalidRequestError)
    with pytest.raises(InvalidRequestError, match=message):
        raise ends[2]
    assert client.tokens[1] == oracle_continuation([1, 2, 3], max_tokens=40, seed=1)


def test_an_id_in_use_is_refused_and_its_first_life_goes_on(gated) -> None:
    engine, executor = gated
    client = Client(engine)
    client.add(1, [1, 2], max_tokens=2)
    executor.entered.get(timeout=30)
    client.add(1, [9], max_tokens=2)
    executor.gate.put(None)
    executor.step()
    ends = [client.ends.get(timeout=30) for _ in range(2)]
    assert [type(end) for _, end in ends] == [InvalidRequestError, FinishReason]
    assert client.tokens[1] == oracle_continuation([1, 2], max_tokens=2, seed=1)


def test_an_abort_during_a_step_delivers_nothing_and_frees_the_blocks(gated) -> None:
    engine, executor = gated
    client = Client(engine)
    client.add(1, [1, 2], max_tokens=100)
    executor.entered.get(timeout=30)
    client.connection.abort(1)
    client.connection.abort(1)
    client.connection.abort(77)
    executor.gate.put(None)
    client.add(1, [3], max_tokens=1)  # the same id, a new life
    for _ in range(engine._pipeline.depth):  # the first life has a row in the steps in between
        executor.step()
    assert client.wait() == {1: FinishReason.LENGTH}
    # The first life's step may have been published before its abort was read, nothing after it.
    assert client.tokens[1][-1:] == oracle_continuation([3], max_tokens=1, seed=1)
    assert len(client.tokens[1]) <= 2
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_closing_a_connection_frees_its_blocks_once_no_step_has_them(gated) -> None:
    engine, executor = gated
    leaving, staying = Client(engine), Client(engine)
    leaving.add(1, [1, 2, 3], max_tokens=100)
    staying.add(1, [4], max_tokens=100)
    executor.step()
    executor.entered.get(timeout=30)
    steps = engine.stats().num_steps
    leaving.connection.close()
    executor.gate.put(None)
    for _ in range(engine._pipeline.depth):
        executor.step()
    executor.entered.get(timeout=30)
    assert engine.stats().num_steps <= steps + engine._pipeline.depth + 1
    assert engine.stats().num_running == 1
    executor.gate.put(None)


def test_a_lost_worker_fails_every_request_and_later_ones(gated) -> None:
    engine, executor = gated
    client = Client(engine)
    client.add(1, [1, 2])
    client.add(2, [3])
    executor.step(WorkerError("rank 1 is gone"))
    assert [str(error) for error in client.wait(2).values()] == ["rank 1 is gone"] * 2
    client.add(3, [4])
    assert str(client.wait()[3]) == "rank 1 is gone"
    assert str(engine.wait(timeout_s=30)) == "rank 1 is gone"


def test_a_bug_in_a_step_is_reported_to_everybody(gated) -> None:
    engine, executor = gated
    client = Client(engine)
    client.add(1, [1, 2])
    executor.step(ZeroDivisionError("oops"))
    (error,) = client.wait().values()
    assert isinstance(error, UnavailableError)
    assert str(error) == "the engine failed: ZeroDivisionError: oops"


def test_stop_fails_what_runs() -> None:
    engine, executor = make_engine(GatedExecutor)
    engine.start()
    client = Client(engine)
    client.add(1, [1], max_tokens=100)
    executor.entered.get(timeout=30)
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    executor.gate.put(None)
    executor.gate.put(None)
    assert str(client.wait()[1]) == "the engine is stopping"
    stopper.join(30)
    assert not stopper.is_alive()


def test_one_call_of_the_sink_brings_a_whole_step(engine: Engine) -> None:
    calls: list[int] = []
    done = threading.Event()

    def sink(outputs: list[RequestOutput | RequestFailure]) -> None:
        calls.append(len(outputs))
        if sum(calls) == 40:
            done.set()

    connection = engine.connect(sink)
    params = complete_params(max_tokens=5, ignore_eos=True)
    requests = [
        Request(request_id=i, prompt_token_ids=[i], params=params, seed=0) for i in range(8)
    ]
    # One call in the inbox, so that no step runs between two requests.
    engine.submit(lambda: [engine.add(connection, request, arrived_s=0.0) for request in requests])
    assert done.wait(30)
    assert calls == [8] * 5


def test_preempted_requests_get_the_same_tokens() -> None:
    engine, _ = make_engine(num_blocks=12, max_num_batched_tokens=16)
    engine.start()
    client = Client(engine)
    for request_id in range(1, 7):
        client.add(request_id, [request_id] * 6, max_tokens=30)
    client.wait(6)
    assert engine.stats().num_preemptions > 0
    engine.stop()
    for request_id in range(1, 7):
        wanted = oracle_continuation([request_id] * 6, max_tokens=30, seed=request_id)
        assert client.tokens[request_id] == wanted


def test_a_request_after_the_end_is_refused_not_forgotten() -> None:
    engine, _ = make_engine()
    engine.start()
    client = Client(engine)
    engine.stop()
    client.add(1, [1])
    assert str(client.wait()[1]) == "the engine is stopping"


def test_end_takes_the_ranks_from_a_step_that_hangs() -> None:
    class HangingExecutor(GatedExecutor):
        def close(self) -> None:
            self.gate.put(WorkerError("the executor was closed"))

    engine, executor = make_engine(HangingExecutor)
    engine.start()
    client = Client(engine)
    client.add(1, [1])
    executor.entered.get(timeout=30)
    engine.end(UnavailableError("the frontend is gone"))
    assert str(client.wait()[1]) == "the frontend is gone"
    engine.stop()
