"""The driver's end of the vetting process."""

import contextlib
import json
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict

from runtime.child_environment import child_environment
from runtime.errors import InvalidRequestError, UnavailableError
from runtime.grammar.limits import GrammarLimits
from runtime.grammar.message import shorten
from runtime.grammar.vetting import STACK_BYTES
from runtime.structure import StructureKind

START_TIMEOUT_S = 30.0
CHUNK_BYTES = 65536


class Vetter:
    """Starts the process when it is first needed, and again after it was killed.

    One thread calls `vet` and `close`; any other may `cancel`, and `vet` then returns at once.
    """

    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # of the two below
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def vet(self, source: str, kind: StructureKind) -> None:
        """Raises InvalidRequestError: wrong, or past a limit; UnavailableError: closed."""
        process = self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([source, kind]).encode() + b"\n")
            process.stdin.flush()
            error = _read_line(process, self._limits.timeout_s)
        except TimeoutError as timeout:
            self._end()
            raise InvalidRequestError(
                f"compiling takes more than {self._limits.timeout_s} s, the limit"
            ) from timeout
        except (EOFError, BrokenPipeError) as ended:
            exit_code = self._end()
            self._check_open()
            raise InvalidRequestError(self._describe(exit_code)) from ended
        if error:
            raise InvalidRequestError(shorten(error))

    def cancel(self) -> None:
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        self.cancel()
        self._end()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._process
        self._end()  # one that ended while nothing was asked of it
        with self._lock:
            if self._closed:
                raise UnavailableError("the engine is stopping")
            # -P: a folder called `runtime` in the current directory must not be taken for ours.
            command = (sys.executable, "-P", "-m", "runtime.grammar.vetting")
            process = subprocess.Popen(
                [*command, json.dumps(asdict(self._limits))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a grammar that overflows the stack says so there
                env=child_environment(),
                start_new_session=True,  # Ctrl-C is for the driver
            )
            self._process = process
        try:
            _read_line(process, START_TIMEOUT_S)
        except (EOFError, TimeoutError) as error:
            self._end()
            self._check_open()
            raise UnavailableError(
                f"the process that tries grammars didn't start: exit code {process.returncode}"
            ) from error
        return process

    def _describe(self, exit_code: int) -> str:
        if exit_code == -signal.SIGSEGV:
            return f"it nests too deep for a stack of {STACK_BYTES} bytes, the limit"
        return (
            f"compiling needs more than {self._limits.max_memory_bytes} bytes, the limit "
            f"(exit code {exit_code})"
        )

    def _end(self) -> int:
        """The exit code of the process; 0 where there is none."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what was left to write has no reader
            process.stdin.close()
        return process.returncode

    def _check_open(self) -> None:
        with self._lock:
            if self._closed:
                raise UnavailableError("the engine is stopping")


def _read_line(process: "subprocess.Popen[bytes]", timeout_s: float) -> str:
    """Raises TimeoutError, or EOFError: the process ended."""
    assert process.stdout is not None
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        chunk = process.stdout.read1(CHUNK_BYTES)  # type: ignore[attr-defined]
        if not chunk:
            raise EOFError
        line += chunk
    return str(json.loads(line))
