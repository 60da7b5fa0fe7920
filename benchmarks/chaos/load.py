"""Steady load: so many clients, each of which asks again at once, and compares what comes."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from benchmarks.chaos.asks import Ask
from benchmarks.chaos.client import Answer, Client, LostError, connected
from benchmarks.overload.client import Target

NUM_CLIENTS = 24
NUM_SHOWN = 5


@dataclass(slots=True)
class Tally:
    """What became of requests."""

    num_requests: int = 0
    longest_s: float = 0.0  # of those that were answered
    lost: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The first of those that went wrong."""
        return [f"lost: {each}" for each in self.lost[:NUM_SHOWN]] + [
            f"differs: {each}" for each in self.differing[:NUM_SHOWN]
        ]


class Load:
    """Asks on a connection to one server; for one event loop."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._tokens = asyncio.Event()

    async def next_tokens(self) -> float:
        """Waits for tokens of any request; when they came, as `time.time` tells."""
        self._tokens.clear()
        await self._tokens.wait()
        return time.time()

    async def answers(self, asks: Sequence[Ask]) -> dict[Ask, Answer]:
        """What each is answered, NUM_CLIENTS at a time. Raises LostError."""
        left, answers = iter(asks), dict[Ask, Answer]()

        async def ask_next(client: Client) -> None:
            for ask in left:
                answers[ask] = await client.ask(ask)

        async with connected(self.target, self._tokens.set) as client, asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(ask_next(client))
        return answers

    @asynccontextmanager
    async def running(self, expected: Mapping[Ask, Answer]) -> AsyncIterator[Tally]:
        """Until the end of the block, after which what was asked is still waited for."""
        tally, ending = Tally(), asyncio.Event()
        asks = itertools.cycle(expected)

        async def ask_again_and_again(client: Client) -> None:
            while not ending.is_set():
                ask = next(asks)
                await _count(tally, client, ask, expected[ask])

        async with connected(self.target, self._tokens.set) as client, asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(ask_again_and_again(client))
            try:
                yield tally
            finally:
                ending.set()


async def _count(tally: Tally, client: Client, ask: Ask, expected: Answer) -> None:
    tally.num_requests += 1
    started = time.monotonic()
    try:
        answer = await client.ask(ask)
    except LostError as error:
        tally.lost.append(f"request {ask.name}: {error}")
        return
    tally.longest_s = max(tally.longest_s, time.monotonic() - started)
    if answer != expected:
        tally.differing.append(f"request {ask.name}: {difference(answer, expected)}")


def difference(answer: Answer, expected: Answer) -> str:
    """Where an answer of the same choices is another one first."""
    for index, wanted in expected.items():
        found = answer[index]
        for place, (mine, theirs) in enumerate(zip(found.tokens, wanted.tokens, strict=False)):
            if mine != theirs:
                return f"choice {index}, token {place}: {mine!r}, undisturbed {theirs!r}"
        if found != wanted:
            return (
                f"choice {index}: {len(found.tokens)} tokens, {len(found.text)} characters, "
                f"{found.end}; undisturbed {len(wanted.tokens)}, {len(wanted.text)}, {wanted.end}"
            )
    return "other choices"
