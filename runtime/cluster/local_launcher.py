"""Workers as plain processes on this machine."""

import json
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from runtime.child_environment import without_secrets
from runtime.cluster.base import OnDeath, WorkerAddress
from runtime.errors import WorkerError
from workers.server import TOKEN_VARIABLE

HOST = "127.0.0.1"
TERMINATE_TIMEOUT_S = 2.0
LOG_TIMEOUT_S = 1.0
NUM_KEPT_LINES = 15


class LocalLauncher:
    """Each worker is `python -m workers.server`, in a session of its own.

    A terminal's Ctrl-C therefore reaches the driver alone. The driver holds the workers' standard
    input, whose end tells them that it is gone, however it went.
    """

    def __init__(
        self, *, token: str, startup_timeout_s: float, cluster_certs: str | None = None
    ) -> None:
        self._token = token
        self._cluster_certs = cluster_certs
        self._startup_timeout_s = startup_timeout_s
        self._closing = threading.Event()
        self._workers: list[_WorkerProcess] = []

    def launch(self, count: int) -> list[WorkerAddress]:
        """As Launcher.launch; all of them are on one node."""
        deadline = time.monotonic() + self._startup_timeout_s
        handshakes: SimpleQueue[tuple[int, str]] = SimpleQueue()
        for rank in range(count):
            worker = _WorkerProcess(rank, handshakes.put)
            # Known before it starts: an interrupt may come at any moment.
            self._workers.append(worker)
            worker.start(self._token, self._cluster_certs)
        ports: dict[int, int] = {}
        while len(ports) < count:
            try:
                rank, line = handshakes.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                late = ", ".join(str(rank) for rank in range(count) if rank not in ports)
                raise WorkerError(
                    f"rank {late} did not start within "
                    f"startup_timeout_s={self._startup_timeout_s:g}"
                ) from None
            if not line:
                cause = self._workers[rank].exit_cause.result()
                raise WorkerError(f"rank {rank} ended before it served: {cause}")
            ports[rank] = json.loads(line)["port"]
        return [
            WorkerAddress(rank=rank, node="local", host=HOST, port=ports[rank])
            for rank in range(count)
        ]

    def watch(self, on_death: OnDeath) -> None:
        """As Launcher.watch; the cause has the exit code and the last lines of the log."""
        for worker in self._workers:
            worker.exit_cause.add_done_callback(self._reporter(worker.rank, on_death))

    def close(self) -> None:
        """As Launcher.close."""
        self._closing.set()
        for worker in self._workers:
            worker.terminate()
        deadline = time.monotonic() + TERMINATE_TIMEOUT_S
        for worker in self._workers:
            worker.end(deadline)

    def _reporter(self, rank: int, on_death: OnDeath) -> Callable[[Future[str]], None]:
        def report(exit_cause: Future[str]) -> None:
            if not self._closing.is_set():
                on_death(rank, exit_cause.result())

        return report


class _WorkerProcess:
    """One process, and the two threads that read what it writes.

    `on_handshake` gets the rank and the first line of standard output, "" where there was none.
    `exit_cause` is done when the process has ended.
    """

    def __init__(self, rank: int, on_handshake: Callable[[tuple[int, str]], None]) -> None:
        self.rank = rank
        self.exit_cause: Future[str] = Future()
        self._on_handshake = on_handshake
        self._kept: deque[str] = deque(maxlen=NUM_KEPT_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._waiter: threading.Thread | None = None

    def start(self, token: str, cluster_certs: str | None) -> None:
        process = subprocess.Popen(
            _command(self.rank, cluster_certs),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**without_secrets(), TOKEN_VARIABLE: token},
        )
        self._process = process
        log_reader = threading.Thread(
            target=self._read_log, args=(process,), name=f"rank-{self.rank}-log", daemon=True
        )
        log_reader.start()
        self._waiter = threading.Thread(
            target=self._wait,
            args=(process, log_reader),
            name=f"rank-{self.rank}-wait",
            daemon=True,
        )
        self._waiter.start()

    def terminate(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()

    def end(self, deadline: float) -> None:
        """Waits for the end; from `deadline` on by killing."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._waiter is not None:
            self._waiter.join(TERMINATE_TIMEOUT_S)

    def _read_log(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        with process.stderr as log:
            for line in log:
                self._kept.append(line)
                sys.stderr.write(f"[rank {self.rank}] {line}")

    def _wait(self, process: "subprocess.Popen[str]", log_reader: threading.Thread) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            first_line = output.readline()
        if first_line:
            self._on_handshake((self.rank, first_line))
        code = process.wait()
        # With a limit: a child of the worker may keep its standard error open.
        log_reader.join(LOG_TIMEOUT_S)
        self.exit_cause.set_result(_describe(code, "".join(self._kept)))
        if not first_line:
            self._on_handshake((self.rank, ""))


def _command(rank: int, cluster_certs: str | None) -> list[str]:
    level = logging.getLogger("workers").getEffectiveLevel()
    # -P: a folder called `workers` in the current directory must not be taken for ours.
    return [
        *(sys.executable, "-P", "-m", "workers.server"),
        *("--host", HOST),
        *("--cuda-device", str(rank)),
        *("--log-level", str(level)),
        *(() if cluster_certs is None else ("--cluster-certs", cluster_certs)),
    ]


def _describe(code: int, log: str) -> str:
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{how}; its last lines:\n{log.rstrip()}" if log else f"{how}, nothing in its log"
