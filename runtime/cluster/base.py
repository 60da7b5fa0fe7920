"""What the worker group needs of whatever starts its processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


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


OnDeath = Callable[[int, str], None]  # rank, cause


class Launcher(Protocol):
    """Starts workers and ends them. One object launches once."""

    def launch(self, count: int) -> list[WorkerAddress]:
        """Starts `count` workers and returns them in the order of their ranks, once all serve.

        Raises ConfigError: they can't be placed. Raises WorkerError: one died or was late.
        What was started before an error, an interrupt included, is ended by `close`.
        """
        ...

    def watch(self, on_death: OnDeath) -> None:
        """Calls `on_death` for each rank that ends before `close`, from another thread."""
        ...

    def close(self) -> None:
        """Ends every worker in a few seconds. May be called twice, and before `launch`."""
        ...
