"""Load on a server, from a process of its own that takes at most one core."""

import asyncio
import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.overload.client import PATIENCE_S, Client, Outcome, Target, connected

# What a process needs beside the load: to start, and for its last requests to end.
EXTRA_S = 60.0 + PATIENCE_S
# Between two looks at the server.
LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """So many clients, each of which asks again when it has its answer."""

    num_clients: int
    seconds: float
    first_number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Requests at random times, whatever becomes of them; nobody tries again."""

    per_second: float
    seconds: float
    first_number: int = 0


Load = ClosedLoop | OpenLoop


def run_load(
    target: Target, load: Load, look: Callable[[], object] = lambda: None
) -> list[Outcome]:
    """Runs it in a process; `look` is called twice a second meanwhile.

    Raises RuntimeError: the process failed, or took too long.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, target, load))
    process.start()
    theirs.close()
    latest_s = time.monotonic() + load.seconds + EXTRA_S
    try:
        while not ours.poll(LOOK_S):
            look()
            if time.monotonic() > latest_s:
                raise RuntimeError(f"the load didn't end within {load.seconds + EXTRA_S:.0f} s")
        outcomes: list[Outcome] = ours.recv()
        return outcomes
    except EOFError as error:
        raise RuntimeError("the process that makes the load failed") from error
    finally:
        process.kill()
        process.join()
        ours.close()


def _run(results: Connection, target: Target, load: Load) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[-1:])
    results.send(asyncio.run(_offer(target, load)))


async def _offer(target: Target, load: Load) -> list[Outcome]:
    async with connected(target) as client:
        match load:
            case ClosedLoop():
                return await _closed(client, load)
            case OpenLoop():
                return await _open(client, load)


async def _closed(client: Client, load: ClosedLoop) -> list[Outcome]:
    numbers = itertools.count(load.first_number)
    end_s = time.monotonic() + load.seconds
    outcomes: list[Outcome] = []

    async def ask_again_and_again() -> None:
        while time.monotonic() < end_s:
            outcomes.append(await client.ask(next(numbers)))

    await asyncio.gather(*(ask_again_and_again() for _ in range(load.num_clients)))
    return outcomes


async def _open(client: Client, load: OpenLoop) -> list[Outcome]:
    draw = random.Random(load.first_number)
    started_s, offset_s = time.monotonic(), 0.0
    tasks = []
    for number in itertools.count(load.first_number):
        offset_s += draw.expovariate(load.per_second)
        if offset_s >= load.seconds:
            break
        await asyncio.sleep(started_s + offset_s - time.monotonic())
        tasks.append(asyncio.create_task(client.ask(number)))
    return await asyncio.gather(*tasks)
