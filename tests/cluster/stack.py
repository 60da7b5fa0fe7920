"""Starts `lockstep serve` as a user does, and talks to it as a client does."""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
import psutil

from protos import common_pb2, inference_pb2, inference_pb2_grpc

START_S = 120
END_S = 10  # the promise: a signal ends everything within ten seconds
READY = re.compile(r"serving \S+ (?:to frontends )?on (\S+:\d+)(?: \(gRPC\) and (\S+) \(HTTP\))?$")


@dataclass(frozen=True)
class Answer:
    """One request's stream, put together."""

    text: str
    token_ids: list[int]
    finish_reason: int
    seed: int


class Server:
    """A server process and its whole family.

    With `--frontends=0` its address is the engine's. `prefix` is what runs its command, such as
    on another host.
    """

    def __init__(self, *options: str, prefix: Sequence[str] = (), **environment: str) -> None:
        self.api_key = secrets.token_hex(8)
        # Short: Ray puts sockets below it.
        self.temporary_folder = Path(tempfile.mkdtemp(prefix="ls"))
        self.process = subprocess.Popen(
            [
                *(*prefix, sys.executable, "-m", "runtime", "serve"),
                *("--port=0", "--http-port=0", *options),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **{k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
                "LOCKSTEP_API_KEY": self.api_key,
                "TMPDIR": str(self.temporary_folder),
                **environment,
            },
        )
        self.family: set[psutil.Process] = set()

    def wait_until_ready(self) -> Self:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := READY.search(line.rstrip()):
                self.address, self.http_address = found.groups()
                self.remember_family()
                return self
        _, errors = self.process.communicate(timeout=START_S)
        raise AssertionError(f"exit code {self.process.returncode}: {errors}")

    def remember_family(self) -> None:
        """Processes to look for at the end, also when they are nobody's children by then."""
        if self.process.poll() is None:
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> int:
        """Ends the server; returns its exit code. Fails if it takes longer than is promised."""
        self.process.send_signal(with_signal)
        self.process.communicate(timeout=END_S)
        self.temporary_folder.rmdir()  # fails if the server has left a file
        return self.process.returncode

    def survivors(self) -> list[psutil.Process]:
        """Members of the family that still run, a moment after the end."""
        _, alive = psutil.wait_procs(self.family, timeout=3)
        return [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]

    def kill(self) -> None:
        """For the end of a test, whatever has happened."""
        for process in self.family:
            if process.is_running():
                process.kill()
        self.process.kill()
        self.process.communicate()

    def stub(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(grpc.insecure_channel(self.address))

    @property
    def key(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),)


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    """A server that is ready; ended, whatever happens, with nothing left of it."""
    server = Server(*options)
    try:
        yield server.wait_until_ready()
        assert server.stop() == 0
        assert server.survivors() == []
    finally:
        server.kill()


def request(prompt: str | Sequence[int], **params: float | bool) -> inference_pb2.GenerateRequest:
    made = inference_pb2.GenerateRequest(sampling_params=common_pb2.SamplingParams(**params))
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.ids.extend(prompt)
    return made


def collect(responses: Iterator[inference_pb2.GenerateResponse]) -> Answer:
    everything = list(responses)
    return Answer(
        text="".join(each.text for each in everything),
        token_ids=[token for each in everything for token in each.token_ids],
        finish_reason=everything[-1].finish_reason,
        seed=everything[0].seed,
    )
