"""What can be set for frontends, and for the whole of `lockstep serve`, validated once."""

import re
from dataclasses import dataclass
from typing import Literal

from runtime.config import (
    MAX_TIMEOUT_S,
    check_not_empty,
    require,
    require_key,
    require_port,
)
from runtime.options import option
from runtime.sampling_params import MAX_CHOICES, MAX_LOGPROBS

MAX_PROMPT_BYTES = 32 << 20
MAX_BODY_BYTES = 256 << 20
MAX_BUFFERED_BYTES = 1 << 40
MAX_FRONTENDS = 32
MAX_AT_ONCE = 1 << 20
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,?#A-Z]+")

ToolParserName = Literal["auto", "hermes", "llama3", "gemma", "none"]
ReasoningParserName = Literal["auto", "think", "none"]
Routing = Literal["least_requests", "two_choices", "prefix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """One frontend process and its public ports."""

    host: str = option("127.0.0.1", "Address that the public ports bind to.")
    port: int = option(50051, "Public gRPC port; 0 takes a free one.")
    http_port: int = option(8000, "Public HTTP port, for OpenAI clients; 0 takes a free one.")
    api_key: str | None = option(
        None,
        "Key that clients send; one is made and printed where neither this nor --api-keys is set.",
        envvar="LOCKSTEP_API_KEY",
    )
    api_keys: str | None = option(
        None,
        'TOML file of tenants and their keys, as such or hashed: name = "sha256:..."; next to '
        "--api-key, whose tenant is `default`.",
    )
    tls_cert: str | None = option(
        None, "PEM file with the certificate of the public ports, and what leads to its CA."
    )
    tls_key: str | None = option(None, "PEM file with the key of --tls-cert.")
    tls_client_ca: str | None = option(
        None, "PEM file of CAs: clients need a certificate that one of them has signed."
    )
    cluster_certs: str | None = option(
        None, "Folder with the certificates that `lockstep certs` makes, for the engine's port."
    )
    reflection: bool = option(False, "Let gRPC clients ask which services there are.")

    cors_origin: tuple[str, ...] = option(
        (),
        "Origin of web pages that browsers let use the HTTP port, such as https://chat.example.org,"
        " or * for any; may be given again.",
    )

    max_prompt_bytes: int = option(4 << 20, "Longest prompt text, in bytes of UTF-8.", unit="bytes")
    max_prompt_tokens: int | None = option(
        None, "Longest prompt in tokens; what the model takes where unset."
    )
    max_body_bytes: int = option(
        8 << 20, "Longest message of a client, HTTP or gRPC.", unit="bytes"
    )
    max_buffered_bytes: int = option(
        256 << 20,
        "Most that a frontend holds of HTTP requests' bodies together; more are refused.",
        unit="bytes",
    )
    max_header_bytes: int = option(16 << 10, "Longest header of an HTTP request.", unit="bytes")
    max_n: int = option(MAX_CHOICES, "Most choices of a request.")
    max_logprobs: int = option(MAX_LOGPROBS, "Most log probabilities for a token.")
    max_requests_per_key: int | None = option(
        None,
        "Most requests at once with one key, per frontend; more are refused. No limit where unset.",
    )
    max_requests: int = option(
        2048, "Most requests at once, of all keys together, per frontend; more are refused."
    )
    max_connections: int = option(
        4096, "Most connections at once, per port and frontend; more are refused."
    )
    read_timeout_s: float = option(
        30.0, "An HTTP client that takes longer to send a request is cut off."
    )
    write_timeout_s: float = option(
        60.0, "A client that takes none of what waits for it for so long is cut off."
    )

    chat_template: str | None = option(
        None, "File with the template that chats are rendered by; the model's own where unset."
    )
    chat_template_timeout_s: float = option(2.0, "A chat that takes longer to render is refused.")
    tool_parser: Literal["auto", "hermes", "llama3", "gemma", "none"] = option(
        "auto", "How the model writes tool calls; auto is what its chat template shows."
    )
    reasoning_parser: Literal["auto", "think", "none"] = option(
        "auto", "How the model marks its reasoning; auto is what its chat template shows."
    )

    routing: Literal["least_requests", "two_choices", "prefix"] = option(
        "least_requests",
        "Which of several engines gets a request: the one with the fewest of this frontend; the "
        "better of two at random, for many frontends; or the one that had prompts with the same "
        "beginning, unless it has many more than others.",
    )
    resume_timeout_s: float = option(
        60.0, "Requests whose engine went away wait so long for one to go on with."
    )
    drain_timeout_s: float = option(
        25.0, "After SIGTERM, requests that run may take so long to finish."
    )
    log_format: Literal["text", "json"] = option("text", "How log lines are written.")
    otlp_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request; "
        "needs the extra `otel`.",
        envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
    )

    def __post_init__(self) -> None:
        require_port("port", self.port)
        require_port("http_port", self.http_port)
        require(
            self.port == 0 or self.port != self.http_port,
            f"http_port={self.http_port} must be another than port={self.port}",
        )
        for name, low, high in (
            ("max_prompt_bytes", 1, MAX_PROMPT_BYTES),
            ("max_body_bytes", 1, MAX_BODY_BYTES),
            ("max_buffered_bytes", self.max_body_bytes, MAX_BUFFERED_BYTES),
            ("max_header_bytes", 1024, 1 << 20),
            ("max_requests", 1, MAX_AT_ONCE),
            ("max_connections", 1, MAX_AT_ONCE),
            ("max_n", 1, MAX_CHOICES),
            ("max_logprobs", 0, MAX_LOGPROBS),
            ("drain_timeout_s", 0, MAX_TIMEOUT_S),
            ("resume_timeout_s", 0, MAX_TIMEOUT_S),
        ):
            value = getattr(self, name)
            require(low <= value <= high, f"{name}={value} must be in [{low}, {high}]")
        for name in ("max_prompt_tokens", "max_requests_per_key"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value} must be at least 1")
        for name in ("chat_template_timeout_s", "read_timeout_s", "write_timeout_s"):
            value = getattr(self, name)
            require(0 < value <= MAX_TIMEOUT_S, f"{name}={value} must be in (0, {MAX_TIMEOUT_S}]")
        check_not_empty(
            self,
            *("api_keys", "chat_template", "otlp_endpoint", "cluster_certs"),
            *("tls_cert", "tls_key", "tls_client_ca"),
        )
        require(
            (self.tls_cert is None) == (self.tls_key is None),
            "tls_cert and tls_key must be set together",
        )
        require(
            self.tls_client_ca is None or self.tls_cert is not None,
            "tls_client_ca needs tls_cert and tls_key",
        )
        for origin in self.cors_origin:
            require(
                origin == "*" or ORIGIN.fullmatch(origin) is not None,
                f"cors_origin={origin!r} must be * or a scheme and a host, with a port where it "
                "isn't the usual one, and nothing behind it: https://chat.example.org",
            )
        if self.api_key is not None:
            require_key("api_key", self.api_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What `lockstep serve` puts around an engine."""

    frontends: int = option(
        1, "Frontend processes, which share the public ports; 0 serves the engine's port alone."
    )
    engine_host: str = option("127.0.0.1", "Address that the engine's port for frontends binds to.")
    engine_port: int = option(
        0,
        "The engine's port for frontends elsewhere (LOCKSTEP_ENGINE_TOKEN has its token); 0 takes "
        "a free one.",
    )

    def __post_init__(self) -> None:
        require_port("engine_port", self.engine_port)
        require(
            0 <= self.frontends <= MAX_FRONTENDS,
            f"frontends={self.frontends} must be in [0, {MAX_FRONTENDS}]",
        )
