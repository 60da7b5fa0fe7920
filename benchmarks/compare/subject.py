"""An engine in processes of its own, which computes when it is asked to and not otherwise."""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import click

from benchmarks.compare import process_tree
from benchmarks.workloads.workload import Workload

STOP_S = 30.0
NUM_ERROR_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectSpec:
    """How to start one."""

    name: str
    command: tuple[str, ...]  # answers lines as benchmarks.peers.runner says
    variables: Mapping[str, str]
    folder: Path | None  # to run in; this process's where None
    # Whether its processes are stopped while another computes. Ours aren't: ranks end when their
    # driver is silent, and idle they sleep.
    pauses: bool


class Turn(NamedTuple):
    """One run of a workload."""

    wall_s: float
    memory_bytes: int  # of all the engine's processes, at its end


class Subject:
    """Started at once; `start` waits until it has answered a request.

    Raises ClickException from each method: it ended, or was silent; with its last words.
    """

    def __init__(self, spec: SubjectSpec, *, timeout_s: float) -> None:
        self.spec = spec
        self.engine = ""
        self.startup_s = 0.0
        self._timeout_s = timeout_s
        self._memory_root = 0
        # A file, not a pipe: what the process prints there must not be able to block it.
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._started_s = time.perf_counter()
        self._process = subprocess.Popen(
            spec.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **spec.variables},
            cwd=spec.folder,
        )

    def __enter__(self) -> "Subject":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        self._log.close()

    def start(self) -> None:
        ready = self._read()
        self.startup_s = time.perf_counter() - self._started_s
        self.engine = ready["engine"]
        self._memory_root = ready["memory_root"]
        self._pause()

    def run(self, workload: Workload) -> Turn:
        """Raises ClickException where a request got other than the tokens it asked for, too."""
        if self.spec.pauses:
            process_tree.go_on(self._process.pid)
        line = json.dumps({"requests": workload.to_json()["requests"]}) + "\n"
        # Where it is gone, reading tells.
        with suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        message = self._read()
        memory = process_tree.memory_bytes(self._memory_root)
        self._pause()
        wanted = [each.output_len for each in workload.requests]
        if message["counts"] != wanted:
            raise click.ClickException(
                f"{self.spec.name}: {workload.name}: output tokens of the requests are "
                f"{message['counts']}, but must be {wanted}"
            )
        return Turn(message["wall_s"], memory)

    def cpu_s(self) -> float:
        """Time that all its processes took so far."""
        return process_tree.cpu_s(self._process.pid)

    def _pause(self) -> None:
        if self.spec.pauses:
            process_tree.stop(self._process.pid)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self._timeout_s):
                process_tree.kill(self._process.pid)
                raise click.ClickException(self._last_words(f"silent for {self._timeout_s:g} s"))
        line = self._process.stdout.readline()
        if not line:
            self._end()
            raise click.ClickException(
                self._last_words(f"ended with code {self._process.returncode}")
            )
        message: dict[str, Any] = json.loads(line)
        return message

    def _last_words(self, what: str) -> str:
        self._log.seek(0)
        lines = self._log.read().splitlines()[-NUM_ERROR_LINES:]
        return "\n".join([f"{self.spec.name}: {what}", *lines])

    def _end(self) -> None:
        """Lets it come to its end by itself; all of it is killed if it doesn't."""
        if self._process.returncode is not None:
            return
        process_tree.go_on(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Broken where it has ended by itself, with something unread.
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process_tree.kill(self._process.pid)
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def sigterm_leaves_blocks() -> Iterator[None]:
    """SIGTERM raises SystemExit meanwhile: an engine that stands still would stand for ever."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
