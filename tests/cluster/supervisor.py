"""Starts static workers and starts them again, as systemd or a loop in a Slurm job would."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from queue import SimpleQueue
from types import TracebackType
from typing import Self

HOST = "127.0.0.1"
START_S = 60


class Supervisor:
    """A worker at each of its ports until it is left; then each is asked to end by SIGTERM."""

    def __init__(self, count: int, token: str) -> None:
        self.keepers = [_Keeper(port, token) for port in free_ports(count)]
        self.addresses = ",".join(f"{HOST}:{each.port}" for each in self.keepers)

    def wait_until_all_serve(self) -> None:
        """Those that were started last."""
        for each in self.keepers:
            assert each.serving.wait(START_S)

    def __enter__(self) -> Self:
        for each in self.keepers:
            each.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each in self.keepers:
            each.close()


class _Keeper:
    def __init__(self, port: int, token: str) -> None:
        self.port = port
        self.exit_codes: SimpleQueue[int] = SimpleQueue()
        self.serving = threading.Event()
        self.process: subprocess.Popen[str] | None = None
        self._token = token
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._keep, name=f"keeper-{port}")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            if self.process is not None:
                self.process.terminate()
        self._thread.join()

    def _keep(self) -> None:
        while True:
            with self._lock:
                if self._closing:
                    return
                self.process = process = start_worker(self.port, self._token)
            with process:
                assert process.stdout is not None
                line = process.stdout.readline()
                if line:
                    assert json.loads(line) == {"port": self.port}
                    self.serving.set()
                code = process.wait()
            self.serving.clear()
            self.exit_codes.put(code)
            if not line:
                return  # nor would the next one serve


def start_worker(port: int, token: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "runtime", "worker", f"--host={HOST}", f"--port={port}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LOCKSTEP_WORKER_TOKEN": token},
    )


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(closing(socket.create_server((HOST, 0)))) for _ in range(count)]
        return [each.getsockname()[1] for each in held]
