"""Runs steps on ranks behind gRPC: one ordered bidirectional stream per rank."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple

import grpc

from protos import worker_pb2
from protos.auth import bearer
from runtime.errors import WorkerError
from runtime.executor.codec import (
    decode_result,
    decode_timings,
    encode_delta,
    encode_sample,
    encode_sampler_inputs,
    encode_step,
)
from runtime.executor.deadlines import StepDeadlines, size_of
from runtime.scheduling.sampler_inputs import SamplerInputs
from runtime.scheduling.step_plan import Execution, StepPlan, StepResult
from runtime.scheduling.token_masks import TokenMasks

EXECUTE = "/lockstep.worker.v1.Worker/Execute"
CAUSES_GRACE_S = 0.25


@dataclass(frozen=True, slots=True)
class _Broken:
    """The rank's stream ended, or the rank is known to be gone."""

    cause: str


class _Sent(NamedTuple):
    """A step that the ranks have."""

    step_id: int
    sent_at: float
    encode_s: float
    size: int  # as StepDeadlines counts


OnBroken = Callable[[int, str], None]  # rank, cause
_Event = tuple[int, worker_pb2.StepReply | _Broken]  # with the rank it is from


class GrpcExecutor:
    """Sends each step to every rank, encoded once, and waits for all replies.

    `channels` are in the order of ranks and stay their owner's. With `share_samples` steps may
    refer to samples of earlier ones. Steps are handed over and waited for on one thread; `fail` and
    `close` may be called from any. `on_broken` hears of a rank whose stream broke, with the
    cause, also while no step runs; on a thread that it may block, and not for streams that the
    executor ends itself. With `check_deltas` ranks get each step as a delta and whole, and compare.
    """

    def __init__(
        self,
        channels: Sequence[grpc.Channel],
        *,
        token: str,
        epoch: int,
        deadlines: StepDeadlines,
        check_ranks: bool,
        share_samples: bool,
        on_broken: OnBroken,
        check_deltas: bool = False,
    ) -> None:
        self._epoch = epoch
        self._check_deltas = check_deltas
        self._share_samples = share_samples
        self._deadlines = deadlines
        self._check_ranks = check_ranks
        self._failure: WorkerError | None = None
        self._closed = threading.Event()
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._on_broken = on_broken
        self._sent: deque[_Sent] = deque()  # oldest first
        self._replied_at = 0.0
        # By rank: the steps it has to reply to, in their order.
        self._owed: list[deque[int]] = [deque() for _ in channels]
        # By step and rank: of steps after the oldest.
        self._early: dict[int, dict[int, worker_pb2.StepReply]] = {}
        self._streams = [
            _Stream(rank, channel, token, self._events.put, self._report)
            for rank, channel in enumerate(channels)
        ]

    def submit(self, plan: StepPlan) -> None:
        """Raises WorkerError: a step has failed before."""
        self._raise_failure()
        started = time.monotonic()
        message = self._encode(plan)
        # Messages put end to end are one message, so that what all ranks get is encoded once.
        sampler_message = message + encode_sampler_inputs(plan.sampler_inputs)
        now = time.monotonic()
        self._sent.append(_Sent(plan.step_id, now, now - started, size_of(plan)))
        for owed in self._owed:
            owed.append(plan.step_id)
        sampler, *others = self._streams
        sampler.send(sampler_message)
        for stream in others:
            stream.send(message)

    def sample(self, step_id: int, inputs: SamplerInputs, masks: TokenMasks) -> None:
        """To the sampler's rank alone."""
        self._streams[0].send(encode_sample(inputs, masks, epoch=self._epoch, step_id=step_id))

    def result(self) -> StepResult:
        """Raises WorkerError: a rank's stream broke, it was late, or the ranks disagree.

        The message names rank, step and cause. It comes as soon as one rank failed, though others
        may still be computing, and again at every later call.
        """
        self._raise_failure()
        step_id, sent_at, encode_s, size = self._sent.popleft()
        try:
            began_at = max(sent_at, self._replied_at)
            timeout_s = self._deadlines.deadline_s(size, is_first=step_id == 1)
            replies = self._collect(step_id, began_at, timeout_s)
            self._replied_at = time.monotonic()
            self._deadlines.learn(size, self._replied_at - began_at)
            if self._check_ranks:
                _check_hashes(step_id, replies)
            result = _result_of(replies[0])
            codec_s = encode_s + time.monotonic() - self._replied_at
            return replace(result, execution=Execution(codec_s, decode_timings(replies)))
        except WorkerError as error:
            self._failure = error
            self._cancel()
            raise

    def fail(self, rank: int, cause: str) -> None:
        """Ends a `result` that waits, and every later one: `rank` is known to be gone."""
        self._events.put((rank, _Broken(cause)))

    def close(self) -> None:
        """Ends the streams; a `result` that waits raises WorkerError. May be called twice."""
        self._closed.set()
        self.fail(0, "closed")
        self._cancel()

    def _report(self, rank: int, cause: str) -> None:
        if not self._closed.is_set() and self._failure is None:
            self._on_broken(rank, cause)

    def _encode(self, plan: StepPlan) -> bytes:
        """As a delta, where the plan is of a series."""
        encode = encode_step
        if plan.delta is not None:
            encode = partial(encode_delta, is_checked=self._check_deltas)
        return encode(
            plan,
            epoch=self._epoch,
            return_input_hash=self._check_ranks,
            share_samples=self._share_samples,
        )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise WorkerError(str(self._failure)) from self._failure

    def _cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    def _collect(
        self, step_id: int, began_at: float, timeout_s: float
    ) -> list[worker_pb2.StepReply]:
        deadline = began_at + timeout_s
        replies = self._early.pop(step_id, {})
        while len(replies) < len(self._streams):
            try:
                rank, event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                late = [rank for rank in range(len(self._streams)) if rank not in replies]
                raise WorkerError(
                    f"rank {_listed(late)} did not reply to step {step_id} within {timeout_s:.3g} s"
                ) from None
            if isinstance(event, _Broken):
                raise WorkerError(f"step {step_id} failed: {self._causes(rank, event)}")
            owed = self._owed[rank].popleft() if self._owed[rank] else 0
            if (event.epoch, event.step_id) != (self._epoch, owed):
                raise WorkerError(
                    f"rank {rank} replied to step {event.step_id} of epoch {event.epoch} "
                    f"instead of step {owed} of epoch {self._epoch}"
                )
            if owed == step_id:
                replies[rank] = event
            else:
                self._early.setdefault(owed, {})[rank] = event
        return [replies[rank] for rank in range(len(self._streams))]

    def _causes(self, rank: int, broken: _Broken) -> str:
        """What broke, and what else breaks in the next moment.

        A rank that lost its peer may report it before the peer's own end is known.
        """
        causes = [f"rank {rank}: {broken.cause}"]
        deadline = time.monotonic() + CAUSES_GRACE_S
        while not self._closed.is_set():
            try:
                rank, event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return "; ".join(causes)
            if isinstance(event, _Broken):
                causes.append(f"rank {rank}: {event.cause}")
        return "the executor was closed"


class _Stream:
    """The ordered stream of one rank, and the thread that reads it."""

    def __init__(
        self,
        rank: int,
        channel: grpc.Channel,
        token: str,
        on_event: Callable[[_Event], None],
        on_broken: OnBroken,
    ) -> None:
        self._rank = rank
        self._on_event = on_event
        self._on_broken = on_broken
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        # No serializer: what is sent is encoded already.
        execute = channel.stream_stream(
            EXECUTE, response_deserializer=worker_pb2.StepReply.FromString
        )
        self._call = execute(self._outgoing(), metadata=bearer(token))
        threading.Thread(target=self._read, name=f"rank-{rank}-replies", daemon=True).start()

    def send(self, message: bytes) -> None:
        self._requests.put(message)

    def cancel(self) -> None:
        self._requests.put(None)
        self._call.cancel()

    def _outgoing(self) -> Iterator[bytes]:
        return iter(self._requests.get, None)

    def _read(self) -> None:
        try:
            for reply in self._call:
                self._on_event((self._rank, reply))
        except grpc.RpcError as error:
            cause = f"{error.code().name}: {error.details()}"
        else:
            cause = "it ended its stream"
        self._on_event((self._rank, _Broken(cause)))
        self._on_broken(self._rank, cause)


def _result_of(reply: worker_pb2.StepReply) -> StepResult:
    if not reply.HasField("result"):
        raise WorkerError(f"rank 0 replied to step {reply.step_id} without a result")
    try:
        return decode_result(reply)
    except ValueError as error:
        raise WorkerError(
            f"rank 0 replied to step {reply.step_id} with a malformed result: {error}"
        ) from error


def _check_hashes(step_id: int, replies: Sequence[worker_pb2.StepReply]) -> None:
    first = replies[0]
    for rank, reply in enumerate(replies):
        if not reply.HasField("input_hash"):
            raise WorkerError(f"rank {rank} returned no input hash for step {step_id}")
        if reply.input_hash != first.input_hash:
            raise WorkerError(
                f"ranks 0 and {rank} disagree in step {step_id}: they ran inputs with the hashes "
                f"{first.input_hash:#018x} and {reply.input_hash:#018x}"
            )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
