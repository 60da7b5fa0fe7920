"""What the worker group needs of whatever starts its processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """Where one rank serves."""

    rank: int
    node: str  # ranks with the same node share its memory and cores
    host: str
    port: int

    @property
    def target(self) -> str:
        """As gRPC writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Death(NamedTuple):
    """The end of one rank."""

    rank: int
    cause: str
    is_outside: bool = False  # nothing that it ran can have caused it


OnDeath = Callable[[Death], None]


class Launcher(Protocol):
    """Starts the workers of one epoch and ends them. One object launches once."""

    @property
    def ends_workers(self) -> bool:
        """Whether `close` does so; else they end when they are asked to, or by their lease."""
        ...

    def launch(self, count: int) -> list[WorkerAddress]:
        """Starts `count` workers and returns them in the order of their ranks, once all serve.

        Raises ConfigError: they can't be placed. Raises WorkerError: one died or was late.
        What was started before an error, an interrupt included, is ended by `close`.
        """
        ...

    def watch(self, on_death: OnDeath) -> None:
        """Calls `on_death` for each rank that ends before `close`, from another thread."""
        ...

    def close(self, *, at_once: bool = False) -> None:
        """Ends every worker in a few seconds, or without a chance to say goodbye.

        May be called twice, before `launch`, and from another thread during it, which then raises
        WorkerError.
        """
        ...


class Cluster(Protocol):
    """Where the workers of one driver run, epoch after epoch."""

    def token(self) -> str:
        """What the workers of the next epoch ask for."""
        ...

    def prepare(self, count: int) -> None:
        """Has the next epoch's workers start, so that its launch is quicker; waits for nothing."""
        ...

    def launcher(self, token: str) -> Launcher:
        """For the next epoch, whose workers ask for `token`.

        Raises ConfigError: there is no such cluster.
        """
        ...

    def close(self) -> None:
        """Leaves the cluster, whose workers have ended. May be called twice."""
        ...
