"""A Ray of our own on this machine, that leaves nothing behind."""

import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ray

from runtime.cluster import ray_janitor
from runtime.errors import ConfigError
from workers.serial_thread import SerialThread

logger = logging.getLogger(__name__)

# Ray puts Unix sockets 64 characters below its folder, and the kernel takes paths of up to 107.
MAX_FOLDER_CHARS = 43

# Ray's least is 75 MiB; its default, a third of the memory, is memory that the ranks want.
OBJECT_STORE_BYTES = 80 << 20

JANITOR_TIMEOUT_S = 6.0

TOLD = "LOCKSTEP_OWN_RAY"


@contextmanager
def own_ray(*, num_cpus: int) -> Iterator[None]:
    """Starts Ray and connects to it; on the way out ends its processes and removes its files.

    So does its janitor where this process is killed: Ray has moments in which SIGTERM aborts it.
    """
    _set_environment()
    folder = _make_folder()
    with (
        _janitor(folder),
        _told(folder),
        connection(
            marked=folder,
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            configure_logging=False,
            log_to_driver=True,
            _temp_dir=folder,
        ),
    ):
        yield


@contextmanager
def connection(*, marked: str | None = None, **options: Any) -> Iterator[None]:
    """`ray.init` and `ray.shutdown`, in a thread of their own; an interrupt waits for both.

    In the main thread, an exception that a signal raises in the middle crashes Ray's native code.
    The thread stays until the end, as the kernel ends Ray's processes with the thread that started
    them. `marked` is the folder that the janitor knows those processes by.
    """

    def start() -> None:
        with _quiet_ray(), _marking(marked) if marked else nullcontext():
            ray.init(**options)

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
def _told(folder: str) -> Iterator[None]:
    """In the environment, as Ray's connection is the process's too."""
    os.environ[TOLD] = folder
    try:
        yield
    finally:
        del os.environ[TOLD]


@contextmanager
def _marking(folder: str) -> Iterator[None]:
    os.environ[ray_janitor.MARK] = folder
    try:
        yield
    finally:
        del os.environ[ray_janitor.MARK]


@contextmanager
def _quiet_ray() -> Iterator[None]:
    """Ray warns that it asks for a token, which is what we want."""
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _set_environment() -> None:
    """For Ray's processes, which inherit it. What the user has set stays.

    It also stays afterwards: Ray reads its token once in the life of a process.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray asks for a token by default; without one here it would write one to the user's home.
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
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
