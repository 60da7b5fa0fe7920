"""`lockstep serve` as processes of its own, and what they take of memory."""

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil

from benchmarks.overload.client import Target
from runtime.frontend_processes import API_KEY_VARIABLE

READY = re.compile(r"serving (\S+) on (\S+:\d+) \(gRPC\) and http://(\S+:\d+) \(HTTP\)")
STOP_S = 15.0


class Family:
    """The memory of a server's processes over time."""

    def __init__(self, processes: Mapping[str, psutil.Process]) -> None:
        self._processes = processes
        self.megabytes: dict[str, list[float]] = {name: [] for name in processes}

    def look(self) -> None:
        for name, process in self._processes.items():
            self.megabytes[name].append(process.memory_info().rss / 1e6)


def driver_and_frontends(pid: int) -> dict[str, psutil.Process]:
    driver = psutil.Process(pid)
    frontends = [each for each in driver.children() if "frontend" in each.cmdline()]
    return {"driver": driver} | {f"frontend {n}": each for n, each in enumerate(frontends, 1)}


class Memory:
    """What one process took, in MB, from before to after."""

    def __init__(self, megabytes: Sequence[float]) -> None:
        quarter = max(1, len(megabytes) // 4)
        self.first = megabytes[0]
        self.largest = max(megabytes)
        # The first quarter fills queues and buffers; after it nothing should grow.
        self.growth = max(megabytes[-quarter:]) - max(megabytes[: 2 * quarter])


@contextmanager
def served(
    options: Sequence[str],
    *,
    prefix: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[tuple[Target, int]]:
    """A server while the block runs, and its process id.

    `prefix` is what runs its command, such as on another host, `variables` are of its environment.
    Raises RuntimeError: it ended before it served, or with an error.
    """
    key = secrets.token_urlsafe(24)
    command = [sys.executable, "-m", "runtime", "serve", "--port=0", "--http-port=0", *options]
    environment = {**os.environ, API_KEY_VARIABLE: key, **(variables or {})}
    server = subprocess.Popen(
        [*prefix, *command], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdout is not None
    with server.stdout:
        try:
            yield _read_target(server.stdout, key), server.pid
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    if server.returncode != 0:
        raise RuntimeError(f"`lockstep serve` ended with code {server.returncode}")


def _read_target(lines: Iterator[str], key: str) -> Target:
    for line in lines:
        if found := READY.search(line):
            model, grpc_address, http_address = found.groups()
            return Target(
                http_address=http_address, grpc_address=grpc_address, api_key=key, model=model
            )
    raise RuntimeError("`lockstep serve` ended before it was ready")
