"""Runs a module of ours in a process of its own, which ends with the caller, however that ends."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

TERMINATE_TIMEOUT_S = 5.0
HAS_CALLER = {"LOCKSTEP_HAS_CALLER": "1"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a helper ended."""

    code: int  # of its exit; the negated signal where one ended it
    lines: list[str]  # what it printed, errors included
    timed_out: bool

    def describe(self) -> str:
        """Why it failed, for a sentence that begins with what it was to do."""
        if self.lines and self.lines[-1].startswith("error: "):
            return self.lines[-1].removeprefix("error: ")
        if self.code == -signal.SIGKILL:
            return "it was killed, as happens where memory runs out"
        said = "\n".join(self.lines[-5:]) or "nothing"
        return f"it ended with code {self.code} and: {said}"


def run_helper(
    module: str,
    arguments: Sequence[str],
    *,
    on_line: Callable[[str], object],
    environment: Mapping[str, str],
    timeout_s: float | None = None,
    pass_fds: Collection[int] = (),
) -> Outcome:
    """Runs `python -m module arguments`; `on_line` gets each line that it prints.

    `environment` comes on top of ours; `pass_fds` stay open in it.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        # Open as long as we live, and no longer (`workers.caller`).
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | environment | HAS_CALLER,
        pass_fds=tuple(pass_fds),
        # The terminal's Ctrl-C comes to us; we pass it on.
        start_new_session=True,
    )
    assert process.stdout is not None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _signal(process, signal.SIGKILL)

    timer = threading.Timer(timeout_s, expire) if timeout_s is not None else None
    lines: list[str] = []
    try:
        if timer is not None:
            timer.start()
        for line in process.stdout:
            lines.append(line.rstrip())
            on_line(lines[-1])
        code = process.wait()
    finally:
        if timer is not None:
            timer.cancel()
        _end(process)
    return Outcome(code, lines, expired.is_set())


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        if process.poll() is None:
            _signal(process, signal.SIGTERM)
            try:
                process.wait(TERMINATE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Also to what it has started: that holds the pipe which we read to its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
