"""Workers as plain processes on this machine."""

import json
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import NamedTuple

from runtime.child_environment import without_secrets
from runtime.cluster.base import Death, OnDeath, WorkerAddress
from runtime.cluster.worker_command import TOKEN_VARIABLE, worker_command
from runtime.errors import WorkerError

HOST = "127.0.0.1"
TERMINATE_TIMEOUT_S = 2.0
LOG_TIMEOUT_S = 1.0
NUM_KEPT_LINES = 15
# Somebody sends them; the others come from what a process does itself.
SENT_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class LocalCluster:
    """Nothing but the machine that the driver is on."""

    def __init__(self, *, startup_timeout_s: float, cluster_certs: str | None = None) -> None:
        self._startup_timeout_s = startup_timeout_s
        self._cluster_certs = cluster_certs
        self._next: LocalLauncher | None = None

    def token(self) -> str:
        """As Cluster.token."""
        return secrets.token_hex(32) if self._next is None else self._next.token

    def prepare(self, count: int) -> None:
        """As Cluster.prepare."""
        if self._next is None:
            self._next = self._make(secrets.token_hex(32))
            self._next.begin(count)

    def launcher(self, token: str) -> "LocalLauncher":
        """As Cluster.launcher."""
        prepared, self._next = self._next, None
        if prepared is not None and prepared.token == token:
            return prepared
        return self._make(token)

    def close(self) -> None:
        """As Cluster.close."""
        if self._next is not None:
            self._next.close(at_once=True)
            self._next = None

    def _make(self, token: str) -> "LocalLauncher":
        return LocalLauncher(
            token=token,
            startup_timeout_s=self._startup_timeout_s,
            cluster_certs=self._cluster_certs,
        )


class LocalLauncher:
    """Each worker is `python -m workers.server`, in a session of its own.

    A terminal's Ctrl-C therefore reaches the driver alone. The driver holds the workers' standard
    input, whose end tells them that it is gone, however it went.
    """

    ends_workers = True

    def __init__(
        self, *, token: str, startup_timeout_s: float, cluster_certs: str | None = None
    ) -> None:
        self.token = token
        self._cluster_certs = cluster_certs
        self._startup_timeout_s = startup_timeout_s
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._workers: list[_WorkerProcess] = []
        self._handshakes: SimpleQueue[tuple[int, str]] = SimpleQueue()

    def begin(self, count: int) -> None:
        """Starts processes, and doesn't wait for them."""
        for rank in range(count):
            worker = _WorkerProcess(rank, self._handshakes.put)
            with self._lock:
                if self._closing.is_set():
                    raise WorkerError("the launcher was closed while workers started")
                # Known before it starts: an interrupt may come at any moment.
                self._workers.append(worker)
                worker.start(self.token, self._cluster_certs)

    def launch(self, count: int) -> list[WorkerAddress]:
        """As Launcher.launch; all of them are on one node."""
        deadline = time.monotonic() + self._startup_timeout_s
        if not self._workers:
            self.begin(count)
        ports: dict[int, int] = {}
        while len(ports) < count:
            try:
                rank, line = self._handshakes.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                late = ", ".join(str(rank) for rank in range(count) if rank not in ports)
                raise WorkerError(
                    f"rank {late} did not start within "
                    f"startup_timeout_s={self._startup_timeout_s:g}"
                ) from None
            if not line:
                cause = _describe(*self._workers[rank].ended.result())
                raise WorkerError(f"rank {rank} ended before it served: {cause}")
            ports[rank] = json.loads(line)["port"]
        return [
            WorkerAddress(rank=rank, node="local", host=HOST, port=ports[rank])
            for rank in range(count)
        ]

    def watch(self, on_death: OnDeath) -> None:
        """As Launcher.watch; the cause has the exit code and the last lines of the log."""
        for worker in self._workers:
            worker.ended.add_done_callback(self._reporter(worker.rank, on_death))

    def close(self, *, at_once: bool = False) -> None:
        """As Launcher.close."""
        with self._lock:
            self._closing.set()
        for worker in self._workers:
            worker.terminate()
        deadline = time.monotonic() + (0.0 if at_once else TERMINATE_TIMEOUT_S)
        for worker in self._workers:
            worker.end(deadline)

    def _reporter(self, rank: int, on_death: OnDeath) -> "Callable[[Future[_Exit]], None]":
        def report(ended: Future[_Exit]) -> None:
            if not self._closing.is_set():
                code, log = ended.result()
                on_death(Death(rank, _describe(code, log), is_outside=-code in SENT_SIGNALS))

        return report


class _Exit(NamedTuple):
    """How a process has ended."""

    code: int
    log: str  # its last lines


class _WorkerProcess:
    """One process, and the two threads that read what it writes.

    `on_handshake` gets the rank and the first line of standard output, "" where there was none.
    `ended` is done when the process has.
    """

    def __init__(self, rank: int, on_handshake: Callable[[tuple[int, str]], None]) -> None:
        self.rank = rank
        self.ended: Future[_Exit] = Future()
        self._on_handshake = on_handshake
        self._kept: deque[str] = deque(maxlen=NUM_KEPT_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._waiter: threading.Thread | None = None

    def start(self, token: str, cluster_certs: str | None) -> None:
        process = subprocess.Popen(
            worker_command(host=HOST, cuda_device=self.rank, cluster_certs=cluster_certs),
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
        self.ended.set_result(_Exit(code, "".join(self._kept)))
        if not first_line:
            self._on_handshake((self.rank, ""))


def _describe(code: int, log: str) -> str:
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{how}; its last lines:\n{log.rstrip()}" if log else f"{how}, nothing in its log"
