"""vLLM's scheduler, in a process of another interpreter, on the same cases."""

import json
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import click

from benchmarks import peers
from benchmarks.scheduler.cases import Case, to_json
from benchmarks.scheduler.timing import Measurement

SCRIPT = Path(peers.__file__).with_name("vllm_scheduler.py")
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
STOP_TIMEOUT_S = 20.0
NUM_ERROR_LINES = 5


class VllmPeer:
    """The process waits while it has no case, so that it doesn't disturb other measurements."""

    def __init__(self, python: Path, script: Path = SCRIPT) -> None:
        self._python = python
        # A file, not a pipe: what the process prints there must not be able to block it.
        self._errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | ENVIRONMENT,
        )

    def __enter__(self) -> "VllmPeer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()
        self._errors.close()

    def measure(self, case: Case) -> Measurement:
        """Raises ClickException: the process ended instead; with the last lines of its errors."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(to_json(case)) + "\n")
            stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = stdout.readline()
        if not line:
            raise click.ClickException(self._last_words())
        return Measurement.from_json(json.loads(line))

    def _last_words(self) -> str:
        self._end()
        self._errors.seek(0)
        lines = self._errors.read().splitlines()[-NUM_ERROR_LINES:]
        return "\n".join(
            [f"--vllm {self._python}: ended with code {self._process.returncode}", *lines]
        )

    def _end(self) -> None:
        """Lets it come to its end by itself; it is killed if it doesn't."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Broken where it has ended by itself, with something unread.
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
