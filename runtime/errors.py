"""What can go wrong, grouped by who can act on it."""


class LockstepError(Exception):
    """Base of every error that Lockstep raises on purpose."""


class InvalidRequestError(LockstepError):
    """The client's request is wrong: the message names field, value and limit.

    Nothing else is affected.
    """


class CapacityError(LockstepError):
    """There is no room now; the same request may be accepted after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(LockstepError):
    """The client's deadline can't be met any more."""


class ModelOutputError(LockstepError):
    """What the model computed for this request is of no use; others aren't affected."""


class UnavailableError(LockstepError):
    """The engine is stopped, starting, or has lost its workers."""


class FingerprintError(LockstepError):
    """Another model has begun what is to be resumed; its tokens would be others."""


class WorkerError(UnavailableError):
    """A rank died, hung, or disagreed with the others. The message names the rank and the cause.

    `is_outside`: what happened to it had nothing to do with what it ran: it was killed, its node is
    gone, or nobody can reach it.
    """

    def __init__(self, message: str, *, is_outside: bool = False) -> None:
        super().__init__(message)
        self.is_outside = is_outside


class ConfigError(LockstepError):
    """The operator's configuration or model can't be served. The message says what to change."""
