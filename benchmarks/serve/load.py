"""Sends requests when they are due, whatever becomes of those before."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.clients import Answer, Client, FailedRequest
from benchmarks.serve.arrivals import Arrival


class Outcome(NamedTuple):
    answer: Answer | None  # None: it failed
    detail: str  # of the failure
    late_s: float  # the client sent it so long after it was due


async def offer(
    client: Client, arrivals: Sequence[Arrival], *, on_end: Callable[[], object] = lambda: None
) -> tuple[list[Outcome], float]:
    """What became of each, in their order, and the seconds from the beginning to the last end.

    An answer with other than the tokens asked for has failed.
    """
    began_s = time.perf_counter()

    async def send(arrival: Arrival) -> Outcome:
        late_s = time.perf_counter() - began_s - arrival.after_s
        request = arrival.request
        try:
            answer = await client.complete(request.prompt, request.output_len)
        except FailedRequest as error:
            return Outcome(None, str(error), late_s)
        finally:
            on_end()
        if answer.num_tokens != request.output_len:
            detail = f"{answer.num_tokens} tokens came, of {request.output_len}"
            return Outcome(None, detail, late_s)
        return Outcome(answer, "", late_s)

    tasks = []
    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            # The clock is what is waited for: arrivals are times.
            await asyncio.sleep(began_s + arrival.after_s - time.perf_counter())
            tasks.append(group.create_task(send(arrival)))
    return [task.result() for task in tasks], time.perf_counter() - began_s
