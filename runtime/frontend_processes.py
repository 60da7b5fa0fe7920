"""Frontends as processes of their own, which share the public ports."""

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from tempfile import TemporaryDirectory

from runtime.child_environment import without_secrets
from runtime.errors import UnavailableError
from runtime.frontend_config import FrontendConfig

logger = logging.getLogger(__name__)

ENGINE_TOKEN_VARIABLE = "LOCKSTEP_ENGINE_TOKEN"
API_KEY_VARIABLE = "LOCKSTEP_API_KEY"
METRICS_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# A frontend that is told to end at once has so long.
FRONTEND_STOP_S = 3.0
# More deaths of one frontend in this time have a reason that starting it again doesn't mend.
MAX_RESTARTS = 3
RESTART_WINDOW_S = 60.0

Process = subprocess.Popen[str]


class Frontends:
    """Processes that are started again where they die. Made by `running_frontends`."""

    def __init__(
        self,
        count: int,
        start: Callable[[], Process],
        *,
        ready_timeout_s: float,
        on_lost: Callable[[UnavailableError], object],
    ) -> None:
        self._frontends = [
            _Frontend(start, ready_timeout_s=ready_timeout_s, on_lost=on_lost) for _ in range(count)
        ]

    def start(self) -> None:
        """Starts all and waits until they serve. Raises UnavailableError: one ended."""
        for each in self._frontends:
            each.start()
        for each in self._frontends:
            each.wait_ready()

    def drain(self, timeout_s: float) -> None:
        """Has them refuse what is new, and waits until what runs has ended, and they with it.

        Kills those that take longer.
        """
        deadline = time.monotonic() + timeout_s
        for each in self._frontends:
            each.ask_to_end(signal.SIGTERM)
        for each in self._frontends:
            each.wait_ended(deadline)

    def leave(self) -> None:
        """None is started again from now on: their engine ends, and they with it."""
        for each in self._frontends:
            each.leave()

    def wait_ended(self, timeout_s: float) -> None:
        """Kills those that take longer."""
        deadline = time.monotonic() + timeout_s
        for each in self._frontends:
            each.wait_ended(deadline)

    def close(self) -> None:
        """Ends all, with whatever they do. May be called twice."""
        for each in self._frontends:
            each.ask_to_end(signal.SIGINT)
        self.wait_ended(FRONTEND_STOP_S)


class _Frontend:
    """One of them: its process, and that which follows where it dies."""

    def __init__(
        self,
        start: Callable[[], Process],
        *,
        ready_timeout_s: float,
        on_lost: Callable[[UnavailableError], object],
    ) -> None:
        self._start = start
        self._ready_timeout_s = ready_timeout_s
        self._on_lost = on_lost
        self._lock = threading.Lock()  # held where one process takes the place of another
        self._process: Process | None = None
        self._keeper: threading.Thread | None = None
        self._is_ready = False
        self._is_left = False
        self._deaths_s: list[float] = []

    def start(self) -> None:
        self._process = self._start()

    def wait_ready(self) -> None:
        """Raises UnavailableError: it ended, or took too long."""
        assert self._process is not None
        read_ready_line(self._process, self._ready_timeout_s)
        self._is_ready = True
        self._keeper = threading.Thread(target=self._keep, name="frontend-keeper", daemon=True)
        self._keeper.start()

    def leave(self) -> None:
        with self._lock:
            self._is_left = True

    def ask_to_end(self, how: signal.Signals) -> None:
        """It isn't started again."""
        self.leave()
        if self._process is not None:
            # Python's own answer to an early SIGINT would be a traceback.
            self._process.send_signal(how if self._is_ready else signal.SIGTERM)

    def wait_ended(self, deadline: float) -> None:
        """Kills it after `deadline`."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._keeper is None:
            _close_output(self._process)
        else:
            self._keeper.join(FRONTEND_STOP_S)

    def _keep(self) -> None:
        """The thread: waits for the process to end, again and again."""
        assert self._process is not None
        while True:
            code = self._process.wait()
            _close_output(self._process)
            with self._lock:
                if self._is_left:
                    return
                if self._dies_too_often():
                    break
                logger.warning("a frontend ended with exit code %d: it is started again", code)
                self._is_ready = False
                self._process = self._start()
            with suppress(UnavailableError):  # the next round sees its end
                read_ready_line(self._process, self._ready_timeout_s)
                self._is_ready = True
        self._on_lost(
            UnavailableError(
                f"the frontend ended with exit code {code}, for the {len(self._deaths_s)}. time "
                f"within {RESTART_WINDOW_S:g} s"
            )
        )

    def _dies_too_often(self) -> bool:
        now = time.monotonic()
        recent = [each for each in self._deaths_s if now - each < RESTART_WINDOW_S]
        self._deaths_s = [*recent, now]
        return len(self._deaths_s) > MAX_RESTARTS


@contextmanager
def running_frontends(
    config: FrontendConfig,
    *,
    count: int,
    engine_address: str,
    engine_token: str,
    verbose: bool,
    ready_timeout_s: float,
    on_lost: Callable[[UnavailableError], object],
) -> Iterator[Frontends]:
    """Frontends that serve, at ports that `ports.reserved` has given; ended on the way out.

    `on_lost` is called on some thread when one dies again and again.
    Raises UnavailableError: one ended before it served.
    """
    with ExitStack() as stack:
        environment = without_secrets() | frontend_secrets(config, engine_token)
        # What one that is killed leaves goes with us.
        temporary = stack.enter_context(TemporaryDirectory(prefix="lockstep-frontends-"))
        environment["TMPDIR"] = temporary
        if count > 1:
            # By files of this folder their numbers are summed.
            folder = stack.enter_context(TemporaryDirectory(prefix="lockstep-metrics-"))
            environment[METRICS_FOLDER_VARIABLE] = folder
        command = frontend_command(config, engine_address, verbose=verbose)
        frontends = Frontends(
            count,
            lambda: start_frontend(command, environment),
            ready_timeout_s=ready_timeout_s,
            on_lost=on_lost,
        )
        stack.callback(frontends.close)
        frontends.start()
        yield frontends


def start_frontend(command: list[str], environment: dict[str, str]) -> Process:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # the terminal's Ctrl-C is the driver's to act on
    )


def frontend_command(config: FrontendConfig, engine_address: str, *, verbose: bool) -> list[str]:
    flags = [
        flag
        for field in fields(config)
        # A key is never on a command line, where everybody reads it.
        if field.name != "api_key"
        for flag in _flags(field.name, getattr(config, field.name))
    ]
    if verbose:
        flags.append("--verbose")
    # -P: a folder called `runtime` in the current directory must not be taken for ours.
    python = [sys.executable, "-P", "-m", "runtime"]
    return [*python, "frontend", f"--engine={engine_address}", "--reuse-port", *flags]


def _flags(name: str, value: object) -> list[str]:
    option = name.replace("_", "-")
    match value:
        case None:
            return []
        case bool():
            return [f"--{option}" if value else f"--no-{option}"]
        case tuple():
            return [f"--{option}={each}" for each in value]
        case _:
            return [f"--{option}={value}"]


def frontend_secrets(config: FrontendConfig, engine_token: str) -> dict[str, str]:
    """What the process gets by its environment."""
    secrets_of_child = {ENGINE_TOKEN_VARIABLE: engine_token}
    if config.api_key is not None:
        secrets_of_child[API_KEY_VARIABLE] = config.api_key
    return secrets_of_child


def _close_output(process: Process) -> None:
    assert process.stdout is not None
    process.stdout.close()


def read_ready_line(frontend: Process, timeout_s: float) -> None:
    """Waits until the frontend serves. One that is late is killed."""
    assert frontend.stdout is not None
    late = threading.Timer(timeout_s, frontend.kill)
    late.daemon = True
    late.start()
    line = frontend.stdout.readline()
    late.cancel()
    if not line:
        raise UnavailableError(f"the frontend ended with exit code {frontend.wait()}")
