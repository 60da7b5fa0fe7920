"""Traces of requests, for who wants them; without OpenTelemetry there is nothing to import."""

from typing import Protocol

from runtime.errors import ConfigError
from runtime.frontend.request_record import Headers, RequestRecord


class Tracing(Protocol):
    """Where requests that have ended are told."""

    def trace(self, record: RequestRecord, headers: Headers) -> str | None:
        """Doesn't wait. Returns the trace's id; None: the request isn't traced."""
        ...

    def close(self) -> None:
        """Sends what wasn't sent, and waits for that for a few seconds at most."""
        ...


class NoTracing:
    """Tells nobody."""

    def trace(self, record: RequestRecord, headers: Headers) -> str | None:
        return None

    def close(self) -> None:
        pass


def open_tracing(endpoint: str | None) -> Tracing:
    """Tells the OpenTelemetry collector at `endpoint`, a URL; None: tells nobody.

    Raises ConfigError: that is no URL, or OpenTelemetry isn't installed.
    """
    if endpoint is None:
        return NoTracing()
    try:
        from runtime.frontend.otel import OtelTracing
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"otlp_endpoint={endpoint} needs OpenTelemetry, of which {error.name} is missing: "
            'pip install "lockstep-serving[otel]"'
        ) from error
    return OtelTracing.to_collector(endpoint)
