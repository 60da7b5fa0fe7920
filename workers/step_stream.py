"""The steps of one Execute call: read ahead, run one after another, answered in their order."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Self

import grpc
import torch

from protos import worker_pb2
from workers.batch import NUM_SHARED_STEPS, Batch, LateInputs
from workers.codec import StepLimits, decode_plan, input_hash
from workers.delta_codec import DeltaDecoder
from workers.errors import OutOfOrderError, StepError
from workers.model_side import Executor
from workers.sampling.sampler import Sampled
from workers.sampling_codec import decode_inputs, decode_masks, encode_result
from workers.serial_thread import SerialThread


@dataclass(slots=True)
class StepOrder:
    """What a step must fit to; it lasts from one stream to the next."""

    next_step_id: int = 1
    shared: dict[int, int] = field(default_factory=dict)  # by step: samples that are kept
    deltas: DeltaDecoder = field(default_factory=DeltaDecoder)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that has come; times are of the host's clock, in seconds."""

    batch: Batch
    request: worker_pb2.StepRequest
    _: KW_ONLY
    arrived: float
    prepared: float
    late: Future[LateInputs] | None  # that sampling waits for


class _Done(NamedTuple):
    """A step that has run; its reply is made while the device goes on."""

    step: _Step
    input_ids: torch.Tensor
    sampled: Sampled | None
    forward_us: int
    sample_us: int


class StepStream:
    """`read` runs on a thread of its own, `replies` on the call's, and steps on the device's."""

    def __init__(
        self,
        executor: Executor,
        limits: StepLimits,
        device: SerialThread,
        order: StepOrder,
        *,
        check_epoch: Callable[[int], None],
        rank: int | None,
    ) -> None:
        self._check_epoch = check_epoch
        self._executor = executor
        self._limits = limits
        self._device = device
        self._order = order
        self._is_sampler = rank == 0
        self._late: deque[tuple[_Step, Future[LateInputs]]] = deque()  # that haven't come
        self._done: SimpleQueue[_Done | Exception | None] = SimpleQueue()
        self._has_failed = False  # for the device's thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody waits for replies any more: the device waits for nothing either."""
        self._give_up()

    def read(self, requests: Iterable[worker_pb2.StepRequest]) -> None:
        """Hands steps to the device as they come, until the stream ends or one is refused."""
        try:
            for request in requests:
                self._take(request)
        except grpc.RpcError:  # the caller has left; what runs is of no use to anybody
            self._done.put(None)
        except Exception as error:
            # After the replies of the steps before it.
            self._device.submit(partial(self._done.put, error))
        else:
            self._device.submit(partial(self._done.put, None))
        self._give_up()

    def replies(self) -> Iterator[worker_pb2.StepReply]:
        """Raises what a step raised, after the replies of those before it."""
        while (done := self._done.get()) is not None:
            if isinstance(done, Exception):
                raise done
            yield self._reply(done)

    def _give_up(self) -> None:
        while self._late:
            self._late.popleft()[1].cancel()

    def _take(self, request: worker_pb2.StepRequest) -> None:
        arrived = time.perf_counter()
        self._check_epoch(request.epoch)
        match request.WhichOneof("step"):
            case "plan" | "delta":
                step = self._accept(request, arrived)
                self._device.submit(lambda: self._run(step))
            case "sample":
                self._sample(request)
            case _:
                raise StepError(
                    f"step {request.step_id}: neither plan, delta nor sample came, must be one of "
                    "them"
                )

    def _accept(self, request: worker_pb2.StepRequest, arrived: float) -> _Step:
        order = self._order
        if request.step_id != order.next_step_id:
            raise OutOfOrderError(
                f"step_id {request.step_id} came, {order.next_step_id} was expected"
            )
        decode = order.deltas.decode if request.HasField("delta") else decode_plan
        batch = decode(request, self._limits, order.shared)
        waits = batch.defers_sampling and self._is_sampler
        if waits and request.HasField("sampler_inputs"):
            raise StepError("sampler_inputs came with a plan that defers sampling: send them later")
        late: Future[LateInputs] | None = Future() if waits else None
        step = _Step(batch, request, arrived=arrived, prepared=time.perf_counter(), late=late)
        if late is not None:
            self._late.append((step, late))
        order.next_step_id += 1
        if batch.shares_samples:
            order.shared[batch.step_id] = len(batch.sample_index)
            order.shared.pop(batch.step_id - NUM_SHARED_STEPS, None)
        return step

    def _sample(self, request: worker_pb2.StepRequest) -> None:
        """What the oldest step waits for that waits for something."""
        if not self._late or self._late[0][0].request.step_id != request.step_id:
            raise StepError(
                f"step {request.step_id}: sample came, which no step with that id waits for"
            )
        step, late = self._late[0]
        num_rows, vocab_size = len(step.batch.sample_index), self._limits.vocab_size
        sample = request.sample
        inputs = decode_inputs(sample.sampler_inputs, num_rows, vocab_size)
        masks = decode_masks("sample.masks", sample.masks, num_rows, vocab_size)
        self._late.popleft()
        late.set_result(LateInputs(inputs=inputs, masks=masks))

    def _run(self, step: _Step) -> None:
        """On the device's thread."""
        if self._has_failed:
            return
        try:
            input_ids = self._executor.forward(step.batch)
            late = None if step.late is None else step.late.result()
            sampled = self._executor.sample(late)
        except CancelledError:  # the stream has ended before the step was whole
            self._has_failed = True
        except Exception as error:
            self._has_failed = True
            self._done.put(error)
        else:
            timings = self._executor.timings
            self._done.put(_Done(step, input_ids, sampled, timings.forward_us, timings.sample_us))

    def _reply(self, done: _Done) -> worker_pb2.StepReply:
        step = done.step
        request, batch = step.request, step.batch
        return worker_pb2.StepReply(
            epoch=request.epoch,
            step_id=request.step_id,
            result=None if done.sampled is None else encode_result(batch, *done.sampled()),
            timings=worker_pb2.StepTimings(
                prepare_us=int((step.prepared - step.arrived) * 1e6),
                forward_us=done.forward_us,
                sample_us=done.sample_us,
            ),
            input_hash=input_hash(batch, done.input_ids) if request.return_input_hash else None,
        )
