"""What a worker refuses, and why."""


class WorkerError(Exception):
    """Base of every error that a worker raises on purpose."""


class ModelError(WorkerError):
    """The model or its files can't be served so: the message names the file or field."""


class NetworkError(WorkerError):
    """The worker's host has no interface as it was asked for."""


class CacheError(WorkerError):
    """The KV cache doesn't fit the device's memory."""


class StepError(WorkerError):
    """A step message is malformed or out of order."""


class OutOfOrderError(WorkerError):
    """The call doesn't fit what came before it: another epoch, a gap in step_id, a second load."""


class CollectiveError(WorkerError):
    """What the ranks do together failed: most often one of them is gone."""
