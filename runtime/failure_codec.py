"""Between failures of requests and the messages of engine.proto."""

import math

from protos import engine_pb2
from runtime.errors import (
    CapacityError,
    DeadlineError,
    InvalidRequestError,
    LockstepError,
    ModelOutputError,
    UnavailableError,
)
from runtime.request import RequestFailure

MS_PER_S = 1000


def encode_failure(failure: RequestFailure) -> engine_pb2.RequestFailed:
    message = engine_pb2.RequestFailed(
        request_id=failure.request_id, kind=_kind(failure.error), message=str(failure.error)
    )
    message.was_refused = failure.was_refused
    if isinstance(failure.error, CapacityError):
        message.retry_after_ms = math.ceil(failure.error.retry_after_s * MS_PER_S)
    return message


def decode_failure(message: engine_pb2.RequestFailed) -> RequestFailure:
    """Raises ValueError: the engine is full and doesn't say when to try again."""
    return RequestFailure(message.request_id, _error(message), message.was_refused)


def _kind(error: LockstepError) -> engine_pb2.RequestFailed.Kind:
    match error:
        case InvalidRequestError():
            return engine_pb2.RequestFailed.KIND_INVALID
        case CapacityError():
            return engine_pb2.RequestFailed.KIND_CAPACITY
        case UnavailableError():
            return engine_pb2.RequestFailed.KIND_UNAVAILABLE
        case DeadlineError():
            return engine_pb2.RequestFailed.KIND_DEADLINE
        case ModelOutputError():
            return engine_pb2.RequestFailed.KIND_MODEL
        case _:
            return engine_pb2.RequestFailed.KIND_INTERNAL


def _error(failed: engine_pb2.RequestFailed) -> LockstepError:
    match failed.kind:
        case engine_pb2.RequestFailed.KIND_INVALID:
            return InvalidRequestError(failed.message)
        case engine_pb2.RequestFailed.KIND_CAPACITY:
            if not failed.HasField("retry_after_ms"):
                raise ValueError("retry_after_ms is missing: KIND_CAPACITY needs one")
            retry_after_s = failed.retry_after_ms / MS_PER_S
            return CapacityError(failed.message, retry_after_s=retry_after_s)
        case engine_pb2.RequestFailed.KIND_UNAVAILABLE:
            return UnavailableError(failed.message)
        case engine_pb2.RequestFailed.KIND_DEADLINE:
            return DeadlineError(failed.message)
        case engine_pb2.RequestFailed.KIND_MODEL:
            return ModelOutputError(failed.message)
        case _:
            return LockstepError(failed.message)
