"""`lockstep serve` over a tiny model, what it runs, and what it leaves."""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

from benchmarks.chaos.engine_log import EngineLog
from benchmarks.chaos.model import MAX_MODEL_LEN
from benchmarks.chaos.places import Place
from benchmarks.overload.client import Target
from benchmarks.overload.server import READY
from runtime.frontend_processes import API_KEY_VARIABLE

TP = 2
STOP_S = 15.0
GONE_S = 5.0
RANK_NAME = "lockstep:rank"
SHARED_MEMORY = Path("/dev/shm")
# 200 blocks of 16 tokens: sequences lose theirs to others.
KV_MEMORY = "800KiB"
OPTIONS = (
    f"--tp={TP}",
    "--dtype=float32",
    "--threads-per-rank=1",
    f"--kv-memory={KV_MEMORY}",
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-batched-tokens=256",
    "--max-num-seqs=32",
    "--log-format=json",
    "--port=0",
    "--http-port=0",
)


@dataclass(slots=True)
class Server:
    """Its processes and its log."""

    target: Target
    process: psutil.Process
    log: EngineLog
    place: Place
    family: set[psutil.Process] = field(default_factory=set)  # all that were ever seen

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes that hold a rank now, on all nodes that can be reached or not."""
        return {
            int(name.removeprefix(RANK_NAME)): each
            for each, name in self._names()
            if name.startswith(RANK_NAME)
        }

    def starting(self) -> list[psutil.Process]:
        """Processes of workers that hold no rank yet."""
        found = []
        for each, name in self._names():
            command = " ".join(_command(each))
            is_worker = "workers.server" in command or "ray::WorkerActor" in command
            if is_worker and not name.startswith(RANK_NAME):
                found.append(each)
        return found

    def _names(self) -> list[tuple[psutil.Process, str]]:
        pairs = [(each, _name(each)) for each in self.remember_family()]
        return [(each, name) for each, name in pairs if name]

    def remember_family(self) -> list[psutil.Process]:
        """All descendants and workers of now, to look for at the end."""
        found = [*self.process.children(recursive=True), *self.place.workers()]
        self.family |= set(found)
        return found


@dataclass(slots=True)
class Leftovers:
    """What is there after a server's end and wasn't before; filled when it has ended."""

    exit_code: int | None = None
    things: list[str] = field(default_factory=list)


@contextmanager
def served(
    model: Path, place: Place, *, log: TextIO, variables: Mapping[str, str]
) -> Iterator[tuple[Server, Leftovers]]:
    """A server while the block runs; afterwards it is known what was left.

    Raises RuntimeError: it ended before it served.
    """
    leftovers = Leftovers()
    shared = set(_shared_memory())
    # Short: Ray puts sockets below it.
    with tempfile.TemporaryDirectory(prefix="lc") as folder:
        key = secrets.token_urlsafe(24)
        command = [
            *(*place.prefix, sys.executable, "-m", "runtime", "serve", f"--model={model}"),
            *(*OPTIONS, *place.options),
        ]
        environment = os.environ | {API_KEY_VARIABLE: key, "TMPDIR": folder}
        environment |= {**place.variables, **variables}
        with running(command, environment, log) as (process, engine_log):
            assert process.stdout is not None
            target = _read_target(process.stdout, key)
            server = Server(target, psutil.Process(process.pid), engine_log, place)
            yield server, leftovers
            server.remember_family()
            process.terminate()
            leftovers.exit_code = process.wait(STOP_S)
            leftovers.things = _survivors(server.family)
            leftovers.things += [f"{each}" for each in Path(folder).iterdir()]
            leftovers.things += [f"{each}" for each in set(_shared_memory()) - shared]


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], log: TextIO
) -> Iterator[tuple["subprocess.Popen[str]", EngineLog]]:
    """A process that logs what an engine does; killed at the end, however that comes."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr, ExitStack() as stack:
        # Before its streams are closed: that would wait for who reads them.
        engine_log = EngineLog(process.stderr, log)
        stack.callback(engine_log.close)
        stack.callback(_kill, process)
        yield process, engine_log


def _read_target(lines: Iterator[str], key: str) -> Target:
    for line in lines:
        if found := READY.search(line):
            model, grpc_address, http_address = found.groups()
            return Target(
                http_address=http_address, grpc_address=grpc_address, api_key=key, model=model
            )
    raise RuntimeError("`lockstep serve` ended before it was ready: its log says why")


def _survivors(family: set[psutil.Process]) -> list[str]:
    _, alive = psutil.wait_procs(family, timeout=GONE_S)
    return [f"process {each.pid}: {each.name()}" for each in alive if _runs(each)]


def _name(process: psutil.Process) -> str:
    """Nothing where it has ended."""
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def _command(process: psutil.Process) -> list[str]:
    """Nothing where it has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _shared_memory() -> list[Path]:
    """Files there that no process has open: others' come and go with them."""
    opened = {link for maps in Path("/proc").glob("[0-9]*/maps") for link in _mapped(maps)}
    return [each for each in SHARED_MEMORY.iterdir() if str(each) not in opened]


def _mapped(maps: Path) -> set[str]:
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # it has ended, or isn't ours
        return set()
    return {line.split(maxsplit=5)[-1] for line in lines if str(SHARED_MEMORY) in line}


def _kill(process: "subprocess.Popen[str]") -> None:
    """For the end, whatever has happened: its workers end with it."""
    process.kill()
    process.wait()
