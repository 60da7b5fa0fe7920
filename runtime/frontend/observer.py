"""Follows each request to its end: counts it, logs it, traces it."""

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from runtime.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    FingerprintError,
    InvalidRequestError,
    LockstepError,
    ModelOutputError,
    UnavailableError,
)
from runtime.frontend.generator import TextStream
from runtime.frontend.metrics import REJECTIONS, FrontendMetrics
from runtime.frontend.request_record import Headers, RequestRecord
from runtime.frontend.tracing import Tracing

logger = logging.getLogger(__name__)

# Of a client's own id, in logs and traces.
MAX_ID_CHARACTERS = 128

OK = "ok"
CANCELLED = "cancelled"
INTERNAL = "internal"
STATUS: dict[type[LockstepError], str] = {
    InvalidRequestError: "invalid",
    CapacityError: "overloaded",
    DeadlineError: "deadline",
    UnavailableError: "unavailable",
    FingerprintError: "other_model",
    ModelOutputError: "model_output",
    ConfigError: "not_configured",
    LockstepError: INTERNAL,
}


def status_of(error: BaseException | None) -> str:
    """How a request ended that `error` has ended. A client that leaves has cancelled it."""
    if error is None:
        return OK
    if isinstance(error, asyncio.CancelledError | GeneratorExit | ConnectionError):
        return CANCELLED
    if not isinstance(error, LockstepError):
        return INTERNAL
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


class Observer:
    """Follows requests for one model."""

    def __init__(
        self,
        metrics: FrontendMetrics,
        tracing: Tracing,
        *,
        model: str,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.metrics = metrics
        self.tracing = tracing
        self.model = model
        self.clock = clock
        self.wall_clock = wall_clock

    def request(
        self,
        endpoint: str,
        request_id: str,
        tenant: str,
        headers: Headers,
    ) -> "SeenRequest":
        """A request from now to the end of the `with` block.

        `headers` have names in lower case; they are asked for a trace to go on with.
        """
        return SeenRequest(self, endpoint, request_id[:MAX_ID_CHARACTERS], tenant, headers)


class SeenRequest:
    """Use as a context manager: the exception that passes says how the request ended."""

    def __init__(
        self,
        observer: Observer,
        endpoint: str,
        request_id: str,
        tenant: str,
        headers: Headers,
    ) -> None:
        self._observer = observer
        self._endpoint = endpoint
        self._request_id = request_id
        self._tenant = tenant
        self._headers = headers
        self._streams: list[TextStream] = []
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None

    def __enter__(self) -> Self:
        self._arrived_s = self._observer.clock()
        self._arrived_at_s = self._observer.wall_clock()
        self._observer.metrics.count_open(self._endpoint)
        return self

    def name(self, request_id: str) -> None:
        """The client calls it so; that was in its body."""
        self._request_id = request_id[:MAX_ID_CHARACTERS]

    def started(self, stream: TextStream) -> None:
        """What answers it; once for each prompt that it has."""
        self._streams.append(stream)

    def delivered(self, num_tokens: int) -> None:
        """The client was given tokens."""
        if not num_tokens:
            return
        self._last_token_s = self._observer.clock()
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s
        self._observer.metrics.count_sent(num_tokens)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        record = self._record(status_of(error))
        metrics = self._observer.metrics
        metrics.count_request(record.endpoint, record.status, record.duration_s)
        # What an engine has begun to answer wasn't refused, however it ended.
        if record.status in REJECTIONS and self._first_token_s is None:
            metrics.count_rejection(record.status)
        trace_id = self._observer.tracing.trace(record, self._headers)
        _log(record, trace_id)

    def _record(self, status: str) -> RequestRecord:
        starts = [stream.start for stream in self._streams if stream.start is not None]
        usages = [stream.usage for stream in self._streams]
        return RequestRecord(
            endpoint=self._endpoint,
            request_id=self._request_id,
            tenant=self._tenant,
            model=self._observer.model,
            status=status,
            params=self._streams[0].params if self._streams else None,
            num_prompt_tokens=sum(each.num_prompt_tokens for each in usages),
            num_cached_tokens=sum(each.num_cached_tokens for each in usages),
            num_output_tokens=sum(each.num_output_tokens for each in usages),
            arrived_s=self._arrived_at_s,
            duration_s=self._observer.clock() - self._arrived_s,
            queue_s=starts[0].queue_s if starts else None,
            prefill_s=starts[0].prefill_s if starts else None,
            ttft_s=self._since_arrival(self._first_token_s),
            last_token_s=self._since_arrival(self._last_token_s),
        )

    def _since_arrival(self, time_s: float | None) -> float | None:
        return None if time_s is None else time_s - self._arrived_s


def _log(record: RequestRecord, trace_id: str | None) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "endpoint": record.endpoint,
        "tenant": record.tenant,
        "status": record.status,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_output_tokens": record.num_output_tokens,
        "queue_s": record.queue_s,
        "ttft_s": record.ttft_s,
        "duration_s": record.duration_s,
    }
    if trace_id is not None:
        fields["trace_id"] = trace_id
    logger.info("request ended", extra=fields)
