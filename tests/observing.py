"""For tests of what frontends tell of requests."""

import asyncio
from collections.abc import Sequence
from typing import Any

from runtime.frontend.choice import Choice
from runtime.frontend.generator import TextStream
from runtime.frontend.metrics import FrontendMetrics
from runtime.frontend.observer import Observer, SeenRequest
from runtime.frontend.request_record import RequestRecord
from runtime.frontend.tracing import NoTracing, Tracing
from runtime.request import RequestOutput
from tests.params import complete_params

ARRIVED_S = 1_700_000_000.0  # on the wall's clock


class Outputs:
    """What an engine is said to have brought."""

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        self._outputs = iter(outputs)

    async def __anext__(self) -> RequestOutput:
        for output in self._outputs:
            return output
        raise StopAsyncIteration

    def end(self, choice: int) -> None:
        raise AssertionError("no choice ends early: there are no stop strings")

    async def aclose(self) -> None:
        pass


def make_stream(
    *outputs: RequestOutput, prompt: Sequence[int] = (1, 2, 3), **params: Any
) -> TextStream:
    complete = complete_params(**params)
    choices = [Choice(None, prompt, complete) for _ in range(complete.n)]
    return TextStream(Outputs(outputs), prompt, complete, choices, (), seed=0, num_scored=0)


class Clock:
    """Goes when the test says so."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class Observed:
    """An observer whose time the test makes."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.clock = Clock()
        self.metrics = FrontendMetrics()
        self.observer = Observer(
            self.metrics,
            NoTracing() if tracing is None else tracing,
            model="tiny",
            clock=self.clock,
            wall_clock=lambda: ARRIVED_S,
        )

    def request(self, endpoint: str = "/v1/completions", **fields: Any) -> SeenRequest:
        given = {"request_id": "r1", "tenant": "acme", "headers": {}} | fields
        return self.observer.request(endpoint, **given)

    def deliver(self, seen: SeenRequest, stream: TextStream, *, after_s: float) -> None:
        """The next of a stream, so long after what was before."""
        self.clock.now += after_s
        delta = asyncio.run(_next(stream))
        seen.delivered(len(delta.token_ids))


async def _next(stream: TextStream) -> Any:
    return await anext(stream)


def make_record(**changes: Any) -> RequestRecord:
    """A request that waited 1 s, prefilled for 2 s, and had its first token after 3.5 s of 10."""
    fields: dict[str, Any] = {
        "endpoint": "/v1/chat/completions",
        "request_id": "r1",
        "tenant": "acme",
        "model": "tiny",
        "status": "ok",
        "params": complete_params(max_tokens=7, temperature=0.5, seed=2**64 - 1),
        "num_prompt_tokens": 11,
        "num_cached_tokens": 4,
        "num_output_tokens": 5,
        "arrived_s": ARRIVED_S,
        "duration_s": 10.0,
        "queue_s": 1.0,
        "prefill_s": 2.0,
        "ttft_s": 3.5,
        "last_token_s": 9.0,
    }
    return RequestRecord(**fields | changes)
