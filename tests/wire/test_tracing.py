"""Traces of requests: what a collector gets."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import SimpleQueue

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from runtime.errors import ConfigError
from runtime.frontend.otel import OtelTracing, traces_url
from runtime.frontend.tracing import NoTracing, open_tracing
from runtime.request import FinishReason, RequestOutput, Start
from tests.observing import ARRIVED_S, Observed, make_record, make_stream

pytestmark = pytest.mark.wire

TIMEOUT_S = 30
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


class Traced:
    """Tracing whose spans stay here."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = OtelTracing(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        spans = self._exporter.get_finished_spans()
        by_name = {span.name: span for span in spans}
        assert len(by_name) == len(spans)
        return by_name

    def times(self, name: str) -> tuple[float, float]:
        """Seconds from the request's arrival."""
        span = self.spans[name]
        assert span.start_time is not None
        assert span.end_time is not None
        return span.start_time / 1e9 - ARRIVED_S, span.end_time / 1e9 - ARRIVED_S


class Collector(HTTPServer):
    """Takes what is exported, until it is told to take nothing more."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorHandler)
        self.received: SimpleQueue[tuple[str, bytes]] = SimpleQueue()
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.put((self.path, body))
        self.server.may_answer.wait(TIMEOUT_S)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running_collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield collector
        finally:
            collector.may_answer.set()
            collector.shutdown()
            thread.join(TIMEOUT_S)


def test_a_request_is_a_span_with_its_parts() -> None:
    traced = Traced()
    trace_id = traced.tracing.trace(make_record(), {})
    assert set(traced.spans) == {"request", "queue", "prefill", "decode"}
    assert traced.times("request") == pytest.approx((0, 10), abs=1e-5)
    assert traced.times("queue") == pytest.approx((0.5, 1.5), abs=1e-5)
    assert traced.times("prefill") == pytest.approx((1.5, 3.5), abs=1e-5)
    assert traced.times("decode") == pytest.approx((3.5, 9), abs=1e-5)
    request = traced.spans.pop("request")
    assert request.kind is SpanKind.SERVER
    assert request.parent is None
    assert trace_id == f"{request.context.trace_id:032x}"
    for name in ("queue", "prefill", "decode"):
        parent = traced.spans[name].parent
        assert parent is not None
        assert parent.span_id == request.context.span_id


def test_attributes_follow_the_conventions_and_have_no_text() -> None:
    traced = Traced()
    traced.tracing.trace(make_record(), {})
    attributes = traced.spans["request"].attributes
    assert attributes is not None
    assert {name: attributes[name] for name in attributes if name.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lockstep",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.time_to_first_chunk": 3.5,
    }
    assert {name: attributes[name] for name in attributes if name.startswith("lockstep.")} == {
        "lockstep.endpoint": "/v1/chat/completions",
        "lockstep.request_id": "r1",
        "lockstep.tenant": "acme",
        "lockstep.status": "ok",
    }


def test_a_trace_goes_on_with_that_of_the_client() -> None:
    traced = Traced()
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    assert traced.tracing.trace(make_record(), headers) == TRACE_ID
    request = traced.spans["request"]
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == PARENT_ID
    assert request.context.trace_state["vendor"] == "1"
    assert {span.context.trace_id for span in traced.spans.values()} == {int(TRACE_ID, 16)}


def test_a_client_that_is_not_sampled_has_no_spans() -> None:
    traced = Traced()
    traced.tracing.trace(make_record(), {"traceparent": TRACEPARENT[:-2] + "00"})
    assert not traced.spans


@pytest.mark.parametrize("header", ["", "00-zz-zz-01", "x" * 10_000, TRACEPARENT.encode()])
def test_a_header_that_is_no_trace_begins_a_new_one(header: str | bytes) -> None:
    traced = Traced()
    trace_id = traced.tracing.trace(make_record(), {"traceparent": header})
    assert trace_id not in (None, TRACE_ID)
    assert traced.spans["request"].parent is None


def test_a_request_without_a_token_is_one_span() -> None:
    traced = Traced()
    record = make_record(
        status="overloaded",
        params=None,
        queue_s=None,
        prefill_s=None,
        ttft_s=None,
        last_token_s=None,
    )
    traced.tracing.trace(record, {})
    (request,) = traced.spans.values()
    assert request.status.status_code is StatusCode.ERROR
    assert request.attributes is not None
    assert request.attributes["error.type"] == "overloaded"
    assert not any(name.startswith("gen_ai.") for name in request.attributes)


@pytest.mark.parametrize("status", ["ok", "cancelled"])
def test_a_request_that_ended_well_is_no_error(status: str) -> None:
    traced = Traced()
    traced.tracing.trace(make_record(status=status), {})
    assert traced.spans["request"].status.status_code is StatusCode.UNSET


def test_parts_stay_within_the_request() -> None:
    """The frontend's clock and the engine's may disagree a little."""
    traced = Traced()
    traced.tracing.trace(make_record(queue_s=60.0, prefill_s=2.0), {})
    assert traced.times("queue") == pytest.approx((0, 1.5), abs=1e-5)


def test_an_observed_stream_is_traced() -> None:
    traced = Traced()
    observed = Observed(traced.tracing)
    stream = make_stream(
        RequestOutput(0, (5,), start=Start(queue_s=0.25, prefill_s=0.5)),
        RequestOutput(0, (6,), FinishReason.STOP),
        max_tokens=2,
    )
    with observed.request(headers={"traceparent": TRACEPARENT}) as seen:
        seen.started(stream)
        observed.deliver(seen, stream, after_s=1.0)
        observed.deliver(seen, stream, after_s=2.0)
        observed.clock.now += 1.0
    assert traced.times("request") == pytest.approx((0, 4), abs=1e-5)
    assert traced.times("queue") == pytest.approx((0.25, 0.5), abs=1e-5)
    assert traced.times("prefill") == pytest.approx((0.5, 1), abs=1e-5)
    assert traced.times("decode") == pytest.approx((1, 3), abs=1e-5)


def test_a_collector_gets_the_spans_at_the_latest_when_tracing_ends() -> None:
    with running_collector() as collector:
        tracing = open_tracing(collector.url)
        tracing.trace(make_record(), {"traceparent": TRACEPARENT})
        tracing.close()
        path, body = collector.received.get(timeout=TIMEOUT_S)
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (service,) = (each for each in resource.resource.attributes if each.key == "service.name")
    assert service.value.string_value == "lockstep"
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"request", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}


def test_a_collector_that_does_not_answer_holds_up_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running_collector() as collector:
        collector.may_answer.clear()
        tracing = OtelTracing.to_collector(collector.url, close_timeout_s=0.05)
        tracing.trace(make_record(), {})
        tracing.close()
        assert not collector.may_answer.is_set()
        assert "longer than 0.05 s: the last traces are lost" in caplog.text


def test_without_an_endpoint_nothing_is_traced() -> None:
    tracing = open_tracing(None)
    assert isinstance(tracing, NoTracing)
    assert tracing.trace(make_record(), {"traceparent": TRACEPARENT}) is None
    tracing.close()


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://host:4318", "http://host:4318/v1/traces"),
        ("http://host:4318/", "http://host:4318/v1/traces"),
        ("https://host/otlp", "https://host/otlp/v1/traces"),
        ("https://host/v1/traces", "https://host/v1/traces"),
    ],
)
def test_traces_go_to_the_path_that_collectors_have_for_them(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["host:4318", "ftp://host", "http://", "http://host:x"])
def test_what_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL of an OTLP/HTTP collector"):
        open_tracing(endpoint)


def test_without_opentelemetry_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "runtime.frontend.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r'pip install "lockstep-serving\[otel\]"'):
        open_tracing("http://localhost:4318")
