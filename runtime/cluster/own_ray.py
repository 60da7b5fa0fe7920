"""A Ray of our own on this machine, that leaves nothing behind."""

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import wait

import ray
from ray._raylet import Config  # type: ignore[attr-defined]

from runtime.child_environment import without_secrets
from runtime.cluster import ray_head, ray_janitor
from runtime.errors import ConfigError, WorkerError
from workers.serial_thread import SerialThread

logger = logging.getLogger(__name__)

# Ray puts Unix sockets 64 characters below its folder, and the kernel takes paths of up to 107.
MAX_FOLDER_CHARS = 43

# Ray's least is 75 MiB; its default, a third of the memory, is memory that the ranks want.
OBJECT_STORE_BYTES = 80 << 20

# Ray's own end takes a second or two.
HEAD_TIMEOUT_S = 5.0
JANITOR_TIMEOUT_S = 6.0

TOLD = "LOCKSTEP_OWN_RAY"


@contextmanager
def own_ray(*, num_cpus: int, startup_timeout_s: float) -> Iterator[None]:
    """Starts Ray and connects to it; on the way out ends its processes and removes its files.

    So does its janitor where this process is killed: Ray has moments in which SIGTERM aborts it.
    Raises WorkerError: Ray did not start, in its own words, or not within `startup_timeout_s`, or
    can't be joined; nothing of it is left.
    """
    _set_environment()
    folder = _make_folder()
    with ExitStack() as stack:
        stack.enter_context(_janitor(folder))
        head = stack.enter_context(_head(folder, num_cpus))
        address = _read_address(head, startup_timeout_s)
        stack.enter_context(_told(folder))
        try:
            stack.enter_context(connection(address=address))
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise WorkerError(f"Ray started but can't be joined: {error}") from error
        yield


@contextmanager
def connection(*, address: str) -> Iterator[None]:
    """`ray.init` and `ray.shutdown`, in a thread of their own; an interrupt waits for both.

    In the main thread, an exception that a signal raises in the middle crashes Ray's native code.
    """

    def start() -> None:
        with _quiet_ray():
            ray.init(address=address, configure_logging=False, log_to_driver=True)

    # A thread that also works at the interpreter's end, where pools are closed.
    thread = SerialThread("ray")
    starting = thread.submit(start)
    try:
        starting.result()
        if threading.current_thread() is threading.main_thread():
            # Ray's native code has put a handler in place that prints its stack.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        yield
    finally:
        thread.run(ray.shutdown)


def has_own_ray() -> bool:
    """Whether this process is connected to a Ray that `own_ray` started."""
    return TOLD in os.environ


@contextmanager
def _janitor(folder: str) -> Iterator[None]:
    janitor = subprocess.Popen(
        [sys.executable, "-P", ray_janitor.__file__, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert janitor.stdin is not None
        janitor.stdin.close()
        if janitor.wait(JANITOR_TIMEOUT_S) != 0:
            logger.warning("some of Ray was not removed: %s", folder)


@contextmanager
def _head(folder: str, num_cpus: int) -> Iterator["subprocess.Popen[str]"]:
    """The process that Ray's are children of, from its start on."""
    options = {
        "num_cpus": num_cpus,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_temp_dir": folder,
    }
    environment = {
        **without_secrets(),
        ray_janitor.MARK: folder,
        # Else gRPC starts threads in what Ray forks, and they crash when its files are closed.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    with subprocess.Popen(
        [sys.executable, "-P", ray_head.__file__, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as head:
        try:
            yield head
        except BaseException:
            # In the middle of its start it would hear nothing. The janitor ends its children.
            head.kill()
            raise
        assert head.stdin is not None
        head.stdin.close()
        try:
            head.wait(HEAD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            head.kill()


def _read_address(head: "subprocess.Popen[str]", startup_timeout_s: float) -> str:
    assert head.stdout is not None
    if not wait([head.stdout.fileno()], startup_timeout_s):
        raise WorkerError(f"Ray did not start within startup_timeout_s={startup_timeout_s:g}")
    line = head.stdout.readline()
    if not line:
        raise WorkerError(f"Ray did not start: its first process ended with code {head.wait()}")
    said: dict[str, str] = json.loads(line)
    if "error" in said:
        raise WorkerError(f"Ray did not start: {said['error']}")
    return said["address"]


@contextmanager
def _told(folder: str) -> Iterator[None]:
    """In the environment, as Ray's connection is the process's too."""
    os.environ[TOLD] = folder
    try:
        yield
    finally:
        del os.environ[TOLD]


@contextmanager
def _quiet_ray() -> Iterator[None]:
    """Ray warns that it has no handler for SIGTERM, which we don't want to have."""
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _set_environment() -> None:
    """For Ray here and its processes, which inherit it. What the user has set stays.

    It also stays afterwards: Ray reads its token once in the life of a process.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray asks for a token by default; without one here it would write one to the user's home.
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        # It has read its settings at its import, and has no public way to read them again.
        Config.initialize("")
    # Ray would hide all GPUs from actors that ask for none, and warn that it will stop doing so.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def _make_folder() -> str:
    folder = tempfile.mkdtemp(prefix="lockstep-")
    if len(folder) > MAX_FOLDER_CHARS:
        os.rmdir(folder)
        raise ConfigError(
            f"the temporary folder {folder} has {len(folder)} characters, Ray's sockets leave "
            f"room for {MAX_FOLDER_CHARS}: set TMPDIR to a shorter path"
        )
    return folder
