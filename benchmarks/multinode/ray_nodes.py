"""A Ray cluster whose nodes are the hosts of a network on this machine."""

import os
import secrets
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

import psutil

from benchmarks.multinode.network import Network
from runtime.cluster import ray_janitor
from runtime.errors import ConfigError

PORT = 6379  # each host has all ports for itself
STARTED = "Ray runtime started"
START_TIMEOUT_S = 120.0  # between two lines
END_TIMEOUT_S = 10.0
JANITOR_TIMEOUT_S = 6.0
OBJECT_STORE_BYTES = 80 << 20
NUM_KEPT_LINES = 15


class RayNodes:
    """One node a host, the head on the first; all run when this is made.

    `close` ends them and removes their files, as does leaving it as a context, and a janitor where
    this process is killed.
    """

    def __init__(self, network: Network, *, cpus_per_node: int = 2, head_cpus: int = -1) -> None:
        """`head_cpus`: of the head, if it has others. Raises ConfigError: a node didn't start."""
        self.network = network
        self.address = f"{network.addresses[0]}:{PORT}"
        with ExitStack() as stack:
            self._folder = tempfile.mkdtemp(prefix="lockstep-")
            stack.callback(self._end_janitor, _start_janitor(self._folder))
            # Of those who join it, and of the nodes themselves.
            self.environment = {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_USAGE_STATS_ENABLED": "0",
            }
            self._nodes: list[_Node] = []
            for host in range(len(network.addresses)):
                num_cpus = head_cpus if host == 0 and head_cpus >= 0 else cpus_per_node
                node = _Node(self._command(host, num_cpus), self._node_environment())
                self._nodes.append(node)
                stack.callback(node.end)
                node.start()
                if host == 0:  # which the others look for
                    node.wait_until_up()
            for node in self._nodes[1:]:
                node.wait_until_up()
            self._cleanup = stack.pop_all()

    def kill_raylet(self, host: int) -> None:
        """Kills what makes a host a node of Ray, and with it all that Ray runs there.

        One that is gone already stays so.
        """
        for process in self.processes(host):
            if process.name() == "raylet":
                process.kill()
        self._nodes[host].wait_until_gone()

    def restart(self, host: int) -> None:
        """Starts a node again whose raylet was killed. Raises ConfigError: it didn't start."""
        self._nodes[host].start()
        self._nodes[host].wait_until_up()

    def processes(self, host: int) -> list[psutil.Process]:
        """What Ray runs on a host."""
        return self._nodes[host].processes()

    def close(self) -> None:
        """May be called twice."""
        self._cleanup.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _command(self, host: int, num_cpus: int) -> list[str]:
        address = self.network.addresses[host]
        place = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if host > 0:
            place = [f"--address={self.address}"]
        return self.network.command(
            host,
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *place),
                f"--node-ip-address={address}",
                f"--num-cpus={num_cpus}",
                f"--temp-dir={self._folder}/{host}",
                f"--object-store-memory={OBJECT_STORE_BYTES}",
                "--disable-usage-stats",
            ],
        )

    def _node_environment(self) -> dict[str, str]:
        return {**os.environ, **self.environment, ray_janitor.MARK: self._folder}

    def _end_janitor(self, janitor: "subprocess.Popen[bytes]") -> None:
        assert janitor.stdin is not None
        janitor.stdin.close()
        if janitor.wait(JANITOR_TIMEOUT_S) != 0:
            raise ConfigError(f"some of Ray was not removed: {self._folder}")


class _Node:
    """`ray start --block` on a host, again and again."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: SimpleQueue[str] = SimpleQueue()

    def start(self) -> None:
        self._lines = lines = SimpleQueue[str]()
        self._process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env=self._environment,
        )
        self._reader = threading.Thread(target=_read, args=(process, lines), name="ray-node")
        self._reader.start()

    def wait_until_up(self) -> None:
        kept: deque[str] = deque(maxlen=NUM_KEPT_LINES)
        while not any(STARTED in line for line in kept):
            try:
                line = self._lines.get(timeout=START_TIMEOUT_S)
            except Empty:
                raise ConfigError(f"a node of Ray said nothing for {START_TIMEOUT_S:g} s") from None
            if not line:
                raise ConfigError(f"a node of Ray did not start: {''.join(kept)}")
            kept.append(line)

    def processes(self) -> list[psutil.Process]:
        if self._process is None or self._process.poll() is not None:
            return []
        children: list[psutil.Process] = psutil.Process(self._process.pid).children(recursive=True)
        return children

    def wait_until_gone(self) -> None:
        assert self._process is not None
        assert self._reader is not None
        self._process.wait(END_TIMEOUT_S)
        self._reader.join(END_TIMEOUT_S)

    def end(self) -> None:
        """Killed, with what it runs: it would say goodbye to each of its own for seconds."""
        if self._process is None:
            return
        for process in self.processes():
            process.kill()
        self._process.kill()
        self.wait_until_gone()


def _read(process: "subprocess.Popen[str]", lines: "SimpleQueue[str]") -> None:
    """What it writes, and "" at its end."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put("")


def _start_janitor(folder: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-P", ray_janitor.__file__, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
