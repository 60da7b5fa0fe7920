"""Processes that the benchmark starts and asks."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

TIMEOUT_S = 60.0
END_S = 10.0


class Child:
    """A process that answers each message; its first answer says what others must know of it.

    `target` is called with its end of a pipe and `arguments`, and returns when the pipe closes.
    """

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        name = target.__name__.removeprefix("run_")
        self._process = context.Process(
            target=target, args=(theirs, *arguments), name=name, daemon=True
        )
        self._process.start()
        theirs.close()  # else its end wouldn't be heard of

    def answer(self) -> Any:
        """Raises RuntimeError: it ended instead, or took too long."""
        if self._pipe.poll(TIMEOUT_S):
            try:
                return self._pipe.recv()
            except EOFError:
                self._process.join(END_S)
                code = self._process.exitcode
                raise RuntimeError(f"the {self._process.name} ended, exit code {code}") from None
        raise RuntimeError(f"the {self._process.name} did not answer within {TIMEOUT_S:g} s")

    def ask(self, message: object) -> Any:
        """As `answer`, to this message."""
        self.tell(message)
        return self.answer()

    def tell(self, message: object) -> None:
        """Without waiting for the answer."""
        self._pipe.send(message)

    def close(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def next_message(pipe: Connection) -> Any:
    """In the child: None once the benchmark has no more questions."""
    try:
        return pipe.recv()
    except EOFError:
        return None
