"""Errors as clients of OpenAI's API know them."""

import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from typing_extensions import TypedDict

from runtime.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    FingerprintError,
    InvalidRequestError,
    LockstepError,
    UnavailableError,
)

# After so long a frontend may have an engine again.
UNAVAILABLE_RETRY_S = 1
# Our messages begin with the field that they are about: messages[2].content is missing.
_FIELD = re.compile(r"([a-z_]+)((?:\.\w+|\[\d+\])*)")


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None  # the field that is wrong
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class Kind(NamedTuple):
    """How errors of one class are told."""

    status: int
    type: str
    code: str | None


class NotFoundError(InvalidRequestError):
    """The request names what isn't here: a model, or a part of OpenAI's API that isn't served."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


KINDS: Mapping[type[LockstepError], Kind] = {
    NotFoundError: Kind(404, "invalid_request_error", None),  # it has a code of its own
    InvalidRequestError: Kind(400, "invalid_request_error", None),
    CapacityError: Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    DeadlineError: Kind(408, "timeout_error", "deadline_exceeded"),
    UnavailableError: Kind(503, "service_unavailable_error", "unavailable"),
    FingerprintError: Kind(412, "invalid_request_error", "model_changed"),
    ConfigError: Kind(500, "server_error", "not_configured"),
    LockstepError: Kind(500, "server_error", None),
}
# Of what is refused without an exception of ours.
STATUSES: Mapping[int, Kind] = {
    401: Kind(401, "authentication_error", "invalid_api_key"),
    404: Kind(404, "invalid_request_error", "unknown_url"),
    405: Kind(405, "invalid_request_error", "method_not_allowed"),
    408: Kind(408, "timeout_error", "request_timeout"),
    413: Kind(413, "invalid_request_error", "request_too_large"),
    431: Kind(431, "invalid_request_error", "headers_too_large"),
    500: Kind(500, "server_error", "internal_error"),
}


def kind_of(error: LockstepError) -> Kind:
    return next(KINDS[kind] for kind in type(error).__mro__ if kind in KINDS)


def error_body(kind: Kind, message: str, param: str | None = None) -> ErrorBody:
    return {
        "error": {"message": message, "type": kind.type, "param": param, "code": kind.code},
    }


def body_of(error: LockstepError, fields: Collection[str]) -> ErrorBody:
    """`fields` are those of the request, one of which the message may begin with."""
    kind = kind_of(error)
    if isinstance(error, NotFoundError):
        return error_body(kind._replace(code=error.code), str(error), error.param)
    param = param_of(str(error), fields) if isinstance(error, InvalidRequestError) else None
    return error_body(kind, str(error), param)


def headers_of(error: LockstepError) -> dict[str, str]:
    """What beside the status says how to go on."""
    if isinstance(error, CapacityError):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, UnavailableError):
        # Behind one port there may be frontends that can take it: a new connection finds them.
        return {"retry-after": str(UNAVAILABLE_RETRY_S), "connection": "close"}
    return {}


def param_of(message: str, fields: Collection[str]) -> str | None:
    """The field with which a message begins: messages[2].content."""
    found = _FIELD.match(message)
    return found[0] if found is not None and found[1] in fields else None


def check_model(name: str, served: str) -> None:
    """Raises NotFoundError: another model is wanted than is served."""
    if name != served:
        raise NotFoundError(
            f"model={name[:80]!r} isn't served here: must be {served!r}",
            code="model_not_found",
            param="model",
        )
