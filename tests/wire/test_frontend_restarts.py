"""Frontend processes that die are started again, unless they shall end."""

import os
import signal
import sys
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import pytest

from runtime.errors import UnavailableError
from runtime.frontend_processes import MAX_RESTARTS, Frontends, Process, start_frontend
from tests.frontend import TIMEOUT_S

pytestmark = pytest.mark.wire

SERVING = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
signal.signal(signal.SIGINT, lambda *_: sys.exit(2))
print("{}", flush=True)
while True:
    signal.pause()
"""
DEAF = SERVING.replace("lambda *_: sys.exit(15)", "signal.SIG_IGN")
REFUSING = "raise SystemExit(2)"


class Started:
    """Frontends that run a program, the processes that they have started, and what was lost."""

    def __init__(self, program: str, count: int = 1) -> None:
        self.program = program
        self.processes: SimpleQueue[Process] = SimpleQueue()
        self.lost: SimpleQueue[UnavailableError] = SimpleQueue()
        self.frontends = Frontends(
            count, self._start, ready_timeout_s=TIMEOUT_S, on_lost=self.lost.put
        )

    def _start(self) -> Process:
        process = start_frontend([sys.executable, "-S", "-c", self.program], dict(os.environ))
        self.processes.put(process)
        return process


@pytest.fixture
def serving() -> Iterator[Started]:
    started = Started(SERVING)
    started.frontends.start()
    yield started
    started.frontends.close()


def test_one_that_dies_is_started_again(serving: Started) -> None:
    first = serving.processes.get(timeout=TIMEOUT_S)
    first.kill()
    second = serving.processes.get(timeout=TIMEOUT_S)
    assert second.pid != first.pid
    assert first.returncode == -signal.SIGKILL
    serving.frontends.close()
    assert second.returncode is not None
    assert serving.processes.empty()
    assert serving.lost.empty()


def test_one_that_dies_again_and_again_is_lost(serving: Started) -> None:
    for _ in range(MAX_RESTARTS + 1):
        serving.processes.get(timeout=TIMEOUT_S).kill()
    lost = serving.lost.get(timeout=TIMEOUT_S)
    assert str(lost) == "the frontend ended with exit code -9, for the 4. time within 60 s"
    assert serving.processes.empty()


def test_one_that_comes_back_and_refuses_is_lost(serving: Started) -> None:
    serving.program = REFUSING
    serving.processes.get(timeout=TIMEOUT_S).kill()
    assert "ended with exit code 2" in str(serving.lost.get(timeout=TIMEOUT_S))


def test_each_may_die_a_few_times() -> None:
    started = Started(SERVING, count=3)
    started.frontends.start()
    for _ in range(3):  # one death of each
        started.processes.get(timeout=TIMEOUT_S).kill()
    again = [started.processes.get(timeout=TIMEOUT_S) for _ in range(3)]
    started.frontends.close()
    assert started.lost.empty()
    assert all(each.returncode is not None for each in again)


def test_one_that_ends_with_its_engine_is_not_started_again(serving: Started) -> None:
    process = serving.processes.get(timeout=TIMEOUT_S)
    serving.frontends.leave()
    process.kill()
    serving.frontends.wait_ended(TIMEOUT_S)
    with pytest.raises(Empty):
        serving.processes.get(block=False)


def test_drained_ones_are_asked_and_closed_ones_are_told(serving: Started) -> None:
    process = serving.processes.get(timeout=TIMEOUT_S)
    serving.frontends.drain(TIMEOUT_S)
    assert process.returncode == 15
    other = Started(SERVING)
    other.frontends.start()
    other.frontends.close()
    assert other.processes.get(timeout=TIMEOUT_S).returncode == 2


def test_one_that_drains_too_long_is_killed() -> None:
    started = Started(DEAF)
    started.frontends.start()
    started.frontends.drain(0.2)
    assert started.processes.get(timeout=TIMEOUT_S).returncode == -signal.SIGKILL


def test_one_that_ends_before_it_serves_is_told() -> None:
    started = Started(REFUSING, count=2)
    with pytest.raises(UnavailableError, match="the frontend ended with exit code 2"):
        started.frontends.start()
    started.frontends.close()
    for _ in range(2):  # whichever way, both have ended
        assert started.processes.get(timeout=TIMEOUT_S).returncode in (2, -signal.SIGTERM)
