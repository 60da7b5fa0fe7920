"""All processes of one deployment, and one measurement on them."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.overhead.cases import Case, Deployment
from benchmarks.overhead.child import TIMEOUT_S, Child
from benchmarks.overhead.driver import Look, run_driver
from benchmarks.overhead.figures import StepTimes, idle_share, intervals_s, lost_share, mean_late_s
from benchmarks.overhead.proxy import DelayedWay, Echo, run_proxy
from benchmarks.overhead.traffic import CountReceived, Leave, Open, run_clients, run_frontend
from benchmarks.overhead.worker import Between, Take, run_worker
from benchmarks.report import percentile

WARM_UP_S = 1.0
POLL_S = 0.05
# While streams are opened, which takes a while at low priority: rows stay about as long as others.
OPENING_STEP_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One window of steady decoding."""

    idle_pct: float  # of the window, in which rank 0 ran no step
    lost_pct: float  # of the window, beyond what the model's own time is: idle and late together
    driver_us: float  # mean of a step: schedule, flatten, encode, decode, update, publish
    schedule_us: float  # of these
    encode_us: float
    publish_us: float
    interval_ms: float  # median, from the start of a step on rank 0 to that of the next
    interval_ms_p99: float
    late_us: float  # mean by which rank 0's steps, its samples shared, took longer than they should
    sent_bytes: float  # median of a step, to rank 0
    sent_bytes_mean: float
    received_pct: float  # tokens that clients got in the window, of those sampled
    added_ms: float | None  # median round trip that the proxy added meanwhile
    num_preemptions: int


class Stack:
    """Workers, proxy, driver, frontend and clients that run. Made by `running_stack`."""

    def __init__(
        self,
        on: Deployment,
        workers: list[Child],
        driver: Child,
        clients: Child,
        way: DelayedWay | None,
    ) -> None:
        self.on = on
        self._workers = workers
        self._driver = driver
        self._clients = clients
        self._way = way

    def measure(self, case: Case, seconds: float) -> Measured:
        """Opens a stream for each row, measures once all of them decode, and closes them."""
        self._pace(OPENING_STEP_S)
        self._clients.ask(Open(case.rows))
        self._wait(lambda look: _num_decoding(look) == case.rows)
        self._pace(case.step_ms / 1000)
        time.sleep(min(WARM_UP_S, seconds))
        received, first = self._clients.ask(CountReceived()), self._look()
        added = self._pass(first.at + seconds)
        last, received_last = self._look(), self._clients.ask(CountReceived())
        steps = self._workers[0].ask(Between(first.at, last.at))
        self._clients.ask(Leave())
        self._wait(lambda look: look.stats.num_running + look.stats.num_waiting == 0)
        per_s = (received_last.num_tokens - received.num_tokens) / (received_last.at - received.at)
        return _sum_up(
            steps,
            first,
            last,
            received_share=per_s * (last.at - first.at),
            added_ms=median(added) * 1000 if added else None,
        )

    def _pace(self, step_s: float) -> None:
        for worker in self._workers:
            worker.ask(Take(step_s))

    def _pass(self, until: float) -> list[float]:
        if self._way is not None:
            return self._way.added_s(until)
        time.sleep(max(0.0, until - perf_counter()))
        return []

    def _look(self) -> Look:
        look: Look = self._driver.ask("look")
        return look

    def _wait(self, holds: Callable[[Look], bool]) -> None:
        deadline = perf_counter() + TIMEOUT_S
        while not holds(self._look()):
            if perf_counter() > deadline:
                raise RuntimeError(f"the rows did not settle within {TIMEOUT_S:g} s")
            time.sleep(POLL_S)


def _num_decoding(look: Look) -> int:
    last = look.stats.last_step
    return 0 if last is None else last.num_decode_sequences


def _sum_up(
    steps: list[StepTimes],
    first: Look,
    last: Look,
    *,
    received_share: float,
    added_ms: float | None,
) -> Measured:
    begin, end = first.at, last.at
    intervals = intervals_s(steps)
    num_steps = last.stats.num_steps - first.stats.num_steps
    sampled = last.stats.num_output_tokens - first.stats.num_output_tokens
    before, after = first.stats.step_s, last.stats.step_s

    def mean_us(total_s: float) -> float:
        return total_s * 1e6 / num_steps

    schedule_us = mean_us(after.schedule.sum - before.schedule.sum)
    encode_us = mean_us(after.encode.sum - before.encode.sum)
    publish_us = mean_us(after.publish.sum - before.publish.sum)
    return Measured(
        idle_pct=100 * idle_share(steps, begin, end),
        lost_pct=100 * lost_share(steps, begin, end),
        driver_us=schedule_us + encode_us + publish_us,
        schedule_us=schedule_us,
        encode_us=encode_us,
        publish_us=publish_us,
        interval_ms=1000 * median(intervals),
        interval_ms_p99=1000 * percentile(intervals, 99),
        late_us=1e6 * mean_late_s(steps),
        sent_bytes=median(last.sent_bytes),
        sent_bytes_mean=sum(last.sent_bytes) / len(last.sent_bytes),
        received_pct=100 * received_share / sampled,
        added_ms=added_ms,
        num_preemptions=last.stats.num_preemptions - first.stats.num_preemptions,
    )


@contextmanager
def running_stack(on: Deployment, model: Path) -> Iterator[Stack]:
    """Starts all processes; `model` is a folder with a tokenizer."""
    token, key = secrets.token_hex(), secrets.token_hex()
    with ExitStack() as stack:

        def start(target: Callable[..., None], *arguments: object) -> Child:
            return stack.enter_context(Child(target, *arguments))

        workers = [start(run_worker, token) for _ in range(on.tp)]
        ports = [worker.answer() for worker in workers]
        way = None
        if on.delay_ms:
            echo = stack.enter_context(closing(Echo()))
            proxy = start(run_proxy, [*ports, echo.port])
            *ports, proxied = proxy.answer()
            way = DelayedWay(proxy, direct_port=echo.port, proxied_port=proxied)
            way.set(on.delay_ms / 1000)
        driver = start(run_driver, ports, token, str(model), on)
        engine = driver.answer()
        frontend = start(run_frontend, engine.port, engine.token, key)
        clients = start(run_clients, frontend.answer(), key)
        clients.answer()
        yield Stack(on, workers, driver, clients, way)
