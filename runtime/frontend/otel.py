"""Traces of requests as OpenTelemetry has them.

A request's spans are made when it has ended, from the times that were taken: `request`, which goes
on with the client's trace, and in it `queue`, `prefill` and `decode`. Attributes follow the
conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/), none of which
has a prompt's or an output's text. Imported only where it is used: it needs the extra `otel`.
"""

import logging
import threading
from importlib.metadata import version
from typing import Self
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from runtime.errors import ConfigError
from runtime.frontend.request_record import Headers, RequestRecord

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 3.0
TRACES_PATH = "/v1/traces"
CHAT_ENDPOINT = "/v1/chat/completions"
# Ends that are neither the server's fault nor the model's.
NO_ERRORS = {"ok", "cancelled"}


class OtelTracing:
    """Makes spans and has `processor` send them."""

    def __init__(
        self, processor: SpanProcessor, *, close_timeout_s: float = CLOSE_TIMEOUT_S
    ) -> None:
        resource = Resource.create(
            {"service.name": "lockstep", "service.version": version("lockstep-serving")}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("lockstep", version("lockstep-serving"))
        self._propagator = TraceContextTextMapPropagator()
        self._close_timeout_s = close_timeout_s

    @classmethod
    def to_collector(cls, endpoint: str, *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> Self:
        """Sends batches from a thread of its own; what a collector is too slow for is dropped.

        Raises ConfigError: `endpoint` is no URL.
        """
        exporter = OTLPSpanExporter(endpoint=traces_url(endpoint))
        return cls(BatchSpanProcessor(exporter), close_timeout_s=close_timeout_s)

    def trace(self, record: RequestRecord, headers: Headers) -> str | None:
        """Goes on with the client's `traceparent`, which says whether it wants to be traced."""
        span = self._tracer.start_span(
            "request",
            context=self._context_of(headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=_nanoseconds(record.arrived_s),
        )
        if span.is_recording():
            if record.status not in NO_ERRORS:
                span.set_status(Status(StatusCode.ERROR, record.status))
                span.set_attribute("error.type", record.status)
            context = trace.set_span_in_context(span, Context())
            for name, begin_s, end_s in _parts(record):
                part = self._tracer.start_span(
                    name, context=context, start_time=_nanoseconds(record.arrived_s + begin_s)
                )
                part.end(_nanoseconds(record.arrived_s + end_s))
        span.end(_nanoseconds(record.arrived_s + record.duration_s))
        return trace.format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Sends what wasn't sent, for `close_timeout_s` at most."""
        # The SDK itself would wait for 30 s where the collector doesn't answer.
        closing = threading.Thread(target=self._provider.shutdown, name="otel-close", daemon=True)
        closing.start()
        closing.join(self._close_timeout_s)
        if closing.is_alive():
            logger.warning(
                "the OpenTelemetry collector took longer than %g s: the last traces are lost",
                self._close_timeout_s,
            )

    def _context_of(self, headers: Headers) -> Context:
        """Empty where the client has no trace, or one that can't be read."""
        carrier = {
            name: value
            for name in self._propagator.fields
            if isinstance(value := headers.get(name), str)
        }
        return self._propagator.extract(carrier, context=Context())


def traces_url(endpoint: str) -> str:
    """Where a collector takes traces: OTEL_EXPORTER_OTLP_ENDPOINT leaves the path to who reads it.

    Raises ConfigError: it is no URL.
    """
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"otlp_endpoint={endpoint} must be a URL of an OTLP/HTTP collector, like "
            "http://localhost:4318"
        )
    url = endpoint.rstrip("/")
    return url if url.endswith(TRACES_PATH) else url + TRACES_PATH


def _parts(record: RequestRecord) -> list[tuple[str, float, float]]:
    """Spans within the request: name, begin and end in seconds from its arrival.

    The engine tells how long queue and prefill took, not when: they ended with the first token.
    """
    first_s, last_s = record.ttft_s, record.last_token_s
    if first_s is None or last_s is None:
        return []
    parts = []
    if record.queue_s is not None and record.prefill_s is not None:
        admitted_s = max(first_s - record.prefill_s, 0.0)
        parts.append(("queue", max(admitted_s - record.queue_s, 0.0), admitted_s))
        parts.append(("prefill", admitted_s, first_s))
    parts.append(("decode", first_s, last_s))
    return parts


def _attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "lockstep.endpoint": record.endpoint,
        "lockstep.request_id": record.request_id,
        "lockstep.tenant": record.tenant,
        "lockstep.status": record.status,
    }
    params = record.params
    if params is None:
        return attributes
    is_chat = record.endpoint == CHAT_ENDPOINT
    attributes |= {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": "lockstep",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.presence_penalty": float(params.presence_penalty),
        "gen_ai.request.frequency_penalty": float(params.frequency_penalty),
        "gen_ai.request.choice.count": params.n,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
    }
    if record.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.ttft_s
    return attributes


def _nanoseconds(time_s: float) -> int:
    return round(time_s * 1e9)
