"""Timings from the ranks to the engine's statistics, and on to its frontends."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest

from protos import common_pb2, engine_pb2, worker_pb2
from runtime import engine_codec
from runtime.arrays import INT32, pack
from runtime.executor.codec import encode_sample, encode_step
from runtime.executor.deadlines import StepDeadlines
from runtime.executor.grpc_executor import EXECUTE, GrpcExecutor
from runtime.request import (
    RankSummary,
    RequestFailure,
    RequestOutput,
    Start,
    StepSummary,
)
from runtime.scheduling.sampler_inputs import no_inputs
from runtime.scheduling.token_masks import no_masks
from runtime.stats_codec import decode_stats, encode_stats
from tests.engine_stats import make_stats
from tests.served import Served
from tests.steps import execute
from tests.transport import (
    EPOCH,
    TIMEOUT_S,
    TOKEN,
    FakeModel,
    example_plan,
    ready_worker,
    result_of,
)

pytestmark = pytest.mark.wire

STATS = replace(
    make_stats(),
    last_step=StepSummary(
        step_id=2**40,
        num_decode_sequences=1,
        num_prefill_sequences=2,
        num_prefill_tokens=3,
        total_s=0.1,
    ),
    ranks=(RankSummary(0, 0.1, 0.2, 0.3), RankSummary(1, 0.4, 0.5, 0.0)),
)


@pytest.mark.parametrize("stats", [STATS, make_stats()], ids=["with a step", "before the first"])
def test_stats_come_back_as_they_were(stats: object) -> None:
    message = common_pb2.EngineStats.FromString(encode_stats(stats).SerializeToString())
    assert decode_stats(message) == stats


def test_every_field_of_the_message_is_filled() -> None:
    message = encode_stats(STATS)
    names = {field.name for field, _ in message.ListFields()}
    assert names == {field.name for field in message.DESCRIPTOR.fields}


def test_a_histogram_that_lacks_a_count_is_refused_by_name() -> None:
    message = encode_stats(STATS)
    message.ttft_s.counts.pop()
    with pytest.raises(ValueError, match="ttft_s: counts has 3 values, bounds has 3"):
        decode_stats(message)


OUTPUTS = [
    RequestOutput(5, (1,), start=Start(0.25, 2.5)),
    RequestOutput(6, (2,)),
    RequestOutput(7, (3,), start=Start(0.0, 1e-6)),
]


def test_starts_come_with_their_choices() -> None:
    message = engine_codec.encode_outputs(OUTPUTS)
    assert engine_codec.decode_outputs(message) == OUTPUTS


def test_a_step_without_starts_has_no_column_for_them() -> None:
    assert not engine_codec.encode_outputs(OUTPUTS[1:2]).HasField("starts")


def test_starts_of_no_row_are_refused() -> None:
    message = engine_codec.encode_outputs(OUTPUTS)
    message.MergeFrom(engine_pb2.StepOutputs(starts=engine_pb2.Starts(rows=pack(INT32, [0, 3]))))
    with pytest.raises(ValueError, match=r"starts.rows has 3: must be in \[0, 3\)"):
        engine_codec.decode_outputs(message)


def test_starts_whose_columns_differ_are_refused() -> None:
    message = engine_codec.encode_outputs(OUTPUTS)
    message.starts.queue_us = message.starts.queue_us[:8]
    with pytest.raises(ValueError, match="2 rows, 1 queue_us, 2 prefill_us: must be equal"):
        engine_codec.decode_outputs(message)


@contextmanager
def answering_rank(timings: worker_pb2.StepTimings) -> Iterator[grpc.Channel]:
    """A rank that says that every step took it so long."""

    def execute(messages: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for message in messages:
            request = worker_pb2.StepRequest.FromString(message)
            yield worker_pb2.StepReply(
                epoch=request.epoch,
                step_id=request.step_id,
                result=result_of({5: 10}),
                timings=timings,
            ).SerializeToString()

    server = grpc.server(ThreadPoolExecutor(2))
    name, method = EXECUTE.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(execute)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {method: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        server.stop(None).wait()


def test_the_executor_tells_what_each_rank_took() -> None:
    first = worker_pb2.StepTimings(prepare_us=100, forward_us=2000, sample_us=300)
    second = worker_pb2.StepTimings(prepare_us=50, forward_us=2500)
    with answering_rank(first) as one, answering_rank(second) as other:
        executor = GrpcExecutor(
            [one, other],
            token=TOKEN,
            epoch=EPOCH,
            deadlines=StepDeadlines(TIMEOUT_S),
            check_ranks=False,
            share_samples=False,
            on_broken=lambda rank, cause: None,
        )
        execution = execute(executor, example_plan()).execution
        executor.close()
    assert execution.encode_s > 0
    assert execution.ranks == (RankSummary(0, 1e-4, 2e-3, 3e-4), RankSummary(1, 5e-5, 2.5e-3, 0.0))


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_times_every_step(rank: int, defers: bool) -> None:
    plan = replace(example_plan(), step_id=1, defer_sampling=defers)
    messages = [encode_step(plan, epoch=EPOCH, return_input_hash=False)]
    if defers and rank == 0:
        messages.append(encode_sample(no_inputs(), no_masks(), epoch=EPOCH, step_id=1))
    with ready_worker(FakeModel(), rank=rank, tp_size=2) as client:
        (reply,) = client.execute(*map(worker_pb2.StepRequest.FromString, messages))
    assert reply.timings.forward_us == FakeModel().timings.forward_us


class Watched(Served):
    """Keeps the starts of its choices, too."""

    def __init__(self, **options: object) -> None:
        self.starts: dict[tuple[int, int], list[Start]] = {}
        super().__init__(**options)

    def _sink(self, outputs: list[RequestOutput | RequestFailure]) -> None:
        for output in outputs:
            if isinstance(output, RequestOutput) and output.start is not None:
                self.starts.setdefault((output.request_id, output.choice), []).append(output.start)
        super()._sink(outputs)


def test_a_start_is_told_once_for_each_choice() -> None:
    served = Watched(max_num_seqs=1)
    served.add(1, [1, 2, 3], max_tokens=2, ignore_eos=True)
    served.add(2, [4, 5, 6], max_tokens=2, n=2, ignore_eos=True)
    served.drain()
    assert served.starts == {
        (1, 0): [Start(0.0, 1.0)],
        (2, 0): [Start(2.0, 1.0)],
        (2, 1): [Start(2.0, 3.0)],
    }


def test_a_step_says_where_its_time_went() -> None:
    served = Served(step_s=2.0)
    served.add(1, [1, 2, 3], max_tokens=3, ignore_eos=True)
    served.drain()
    stats = served.engine.stats()
    assert (stats.step_s.total.count, stats.step_s.total.sum) == (3, 6.0)
    assert (stats.step_s.wire.sum, stats.step_s.forward.count) == (6.0, 0)
    assert (stats.ttft_s.sum, stats.itl_s.sum, stats.e2e_s.sum) == (2.0, 4.0, 6.0)
    assert (stats.last_step.step_id, stats.last_step.num_decode_sequences) == (3, 1)
    assert decode_stats(encode_stats(stats)) == stats


def test_ends_are_counted_by_why() -> None:
    served = Served()
    for request_id in (1, 2, 3):
        served.add(request_id, [request_id, 2, 3], max_tokens=4, n=2, ignore_eos=True)
    served.engine.step()
    served.abort(1, 0)  # a stop string
    served.abort(2)
    served.drain()
    stats = served.engine.stats()
    ends = (stats.num_finished_stop, stats.num_finished_length, stats.num_finished_abort)
    assert ends == (1, 3, 2)
    assert stats.e2e_s.count == 2
    assert stats.output_tokens.count == 6


def test_requests_that_fail_or_never_ran_end_in_no_way() -> None:
    served = Served()
    served.add(1, [1, 2, 3], ignore_eos=True)
    served.add(2, [4, 5, 6], timeout_s=-1.0)
    served.executor.faulty.add(1)
    served.drain()
    stats = served.engine.stats()
    assert (stats.num_invalid_logits, stats.num_timed_out) == (1, 1)
    assert (stats.num_finished_stop, stats.num_finished_length) == (0, 0)
    assert stats.num_finished_abort == 0
    assert (stats.queue_s.count, stats.ttft_s.count, stats.e2e_s.count) == (1, 0, 0)
