"""Replicas behind a router, each with an engine of its own, on one axis of virtual time.

A replica that has work runs a step from its own time on, and is due again at the step's end. What
is due first happens first, so that an arrival goes to the replicas as they are at that moment, and
waits for the end of the step that runs, as it does in the real engine.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from benchmarks.simulate.deployment import Deployment
from benchmarks.simulate.executor import SimulatedExecutor, VirtualClock
from benchmarks.simulate.prompts import Prompts
from benchmarks.simulate.request_log import RequestLog
from benchmarks.simulate.router import make_router
from benchmarks.simulate.timeline import Timeline
from benchmarks.simulate.workload import SimulatedRequest
from runtime.live_requests import Outputs
from runtime.request import EngineStats, Request


class Replica:
    """One engine, stepped by hand, and what it has been through."""

    def __init__(self, deployment: Deployment, log: RequestLog) -> None:
        self.clock = VirtualClock()
        self.timeline = Timeline()
        executor = SimulatedExecutor(deployment.cost, self.clock, on_step=self._on_step)
        self._engine = deployment.make_engine(executor, self.clock)
        self._connection = self._engine.connect(self._take)
        self._log = log
        self.num_ended = 0  # since somebody last looked

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def add(self, request: Request, *, arrived_s: float) -> None:
        """At the end of the step that runs, if one runs."""
        self._engine.add(self._connection, request, arrived_s=arrived_s)

    def step(self) -> None:
        self._engine.step()

    def take_num_ended(self) -> int:
        num_ended, self.num_ended = self.num_ended, 0
        return num_ended

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def _on_step(self, start_s: float, seconds: float) -> None:
        self.timeline.add(start_s, seconds, self._engine.stats())

    def _take(self, outputs: Outputs) -> None:
        self.num_ended += self._log.record(self.clock.now_s, outputs)


class Replicas:
    """Serves a list of requests, once."""

    def __init__(self, deployment: Deployment, requests: Sequence[SimulatedRequest]) -> None:
        self.log = RequestLog(requests)
        self._requests = requests
        self._replicas = [Replica(deployment, self.log) for _ in range(deployment.num_replicas)]
        self._router = make_router(deployment.router)
        self._loads = [0] * deployment.num_replicas
        self._prompts = Prompts(
            vocab_size=deployment.shape.vocab_size,
            longest=max(each.num_prompt_tokens for each in requests),
        )
        # The replicas in a step or about to start one, by the time it ends or starts.
        self._due: list[tuple[float, int]] = []
        self._is_due = [False] * deployment.num_replicas

    @property
    def timelines(self) -> list[Timeline]:
        return [replica.timeline for replica in self._replicas]

    def stats(self) -> list[EngineStats]:
        return [replica.stats() for replica in self._replicas]

    def run(self) -> None:
        """Until every request has ended."""
        for number, request in enumerate(self._requests):
            self._run_until(request.arrival_s)
            self._arrive(number, request)
        self._run_until(float("inf"))

    def _run_until(self, time_s: float) -> None:
        """All steps that start before `time_s`."""
        while self._due and self._due[0][0] < time_s:
            _, index = heappop(self._due)
            self._is_due[index] = False
            replica = self._replicas[index]
            # Only now is the step over that was run when it began.
            self._loads[index] -= replica.take_num_ended()
            if replica.has_work:
                replica.step()
                self._make_due(index)

    def _arrive(self, number: int, request: SimulatedRequest) -> None:
        index = self._router.choose(request, self._loads)
        replica = self._replicas[index]
        if not self._is_due[index]:
            replica.clock.now_s = request.arrival_s
            self._make_due(index)
        self._loads[index] += 1
        replica.add(self._prompts.request(number, request), arrived_s=request.arrival_s)

    def _make_due(self, index: int) -> None:
        self._is_due[index] = True
        heappush(self._due, (self._replicas[index].clock.now_s, index))
