"""Clients that come, ask, leave early or late, and come again."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from benchmarks.soak.asks import Ask, draw_ask, make_probes
from benchmarks.soak.client import Answer, Client, Outcome

NUM_PROBES = 26
NUM_PROBING = 6
NUM_VISITORS = 20
MEAN_PAUSE_S = 0.3
NUM_IN_BURST = 24
MEAN_CALM_S = 4.0
# Who leaves does so within so long: before the first token, or somewhere in between.
SHARE_LEAVING = 0.2
MAX_STAY_S = 1.5
MAX_KEPT_FAULTS = 20


@dataclass(slots=True)
class Log:
    """How all requests ended."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)  # kind, end
    num_probed: int = 0
    num_faults: int = 0
    faults: list[str] = field(default_factory=list)  # the first ones

    def add_fault(self, fault: str) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_KEPT_FAULTS:
            self.faults.append(fault)


class Traffic:
    """What asks one server, drawn from `draw`.

    Probes are the same requests in every round, which must bring the same tokens.
    """

    def __init__(self, client: Client, draw: Random) -> None:
        self.log = Log()
        self._client = client
        self._draw = draw
        self._probes = make_probes(NUM_PROBES)
        self._expected: dict[tuple[int, bool], Answer] = {}  # by probe, and whether in a chat

    async def run(self, seconds: float) -> None:
        """One round: at least so long, until all probes were answered and the last one has left."""
        end_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            probes = tasks.create_task(self._probe())

            def is_over() -> bool:
                return probes.done() and time.monotonic() > end_s

            tasks.create_task(self._burst(is_over))
            for _ in range(NUM_VISITORS):
                tasks.create_task(self._visit(is_over))

    async def _visit(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._note(await self._ask(draw_ask(self._draw)))
            await asyncio.sleep(self._draw.expovariate(1 / MEAN_PAUSE_S))

    async def _burst(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            asks = [draw_ask(self._draw) for _ in range(NUM_IN_BURST)]
            for outcome in await asyncio.gather(*map(self._ask, asks)):
                self._note(outcome)
            await asyncio.sleep(self._draw.expovariate(1 / MEAN_CALM_S))

    async def _ask(self, ask: Ask) -> Outcome:
        leaves = self._draw.random() < SHARE_LEAVING
        leave_after_s = self._draw.uniform(0.001, MAX_STAY_S) if leaves else None
        way = self._draw.choice(ask.ways)
        return await self._client.ask(ask, way, leave_after_s=leave_after_s)

    async def _probe(self) -> None:
        """Each of them once, among all else."""
        numbers = iter(self._draw.sample(range(NUM_PROBES), NUM_PROBES))
        await asyncio.gather(*(self._probe_in_turn(numbers) for _ in range(NUM_PROBING)))

    async def _probe_in_turn(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            ask = self._probes[number]
            way = self._draw.choice(ask.ways)
            outcome = await self._client.ask(ask, way, leave_after_s=None)
            self._note(outcome)
            self.log.num_probed += 1
            if outcome.end == "answered":
                self._compare(number, outcome)

    def _compare(self, number: int, outcome: Outcome) -> None:
        """A chat's prompt is another one."""
        answer = outcome.answer
        expected = self._expected.setdefault((number, outcome.way == "chat"), answer)
        if answer.differs_from(expected):
            self.log.add_fault(
                f"probe {number} ({outcome.ask.kind}, {outcome.way}) brought "
                f"{dict(answer.texts)}, before: {dict(expected.texts)}"
            )
        elif not expected.token_ids:  # the first one came by HTTP
            expected.token_ids |= answer.token_ids

    def _note(self, outcome: Outcome) -> None:
        self.log.ends[outcome.ask.kind, outcome.end] += 1
        if outcome.end == "failed":
            self.log.add_fault(f"{outcome.ask.kind}, {outcome.way}: {outcome.detail}")
