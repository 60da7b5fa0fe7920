"""What is known of a request when it has ended: for its log line and its trace."""

from collections.abc import Mapping
from dataclasses import dataclass

from runtime.sampling_params import CompleteParams

# What came with a request, by HTTP or gRPC; names in lower case.
Headers = Mapping[str, str | bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Neither its prompt nor its output. None where it didn't come that far."""

    endpoint: str
    request_id: str
    tenant: str
    model: str
    status: str
    params: CompleteParams | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    arrived_s: float  # seconds since 1970
    duration_s: float
    queue_s: float | None  # from the engine: to its admission
    prefill_s: float | None  # and from there to its first token
    ttft_s: float | None  # from its arrival to the first token and to the last one
    last_token_s: float | None
