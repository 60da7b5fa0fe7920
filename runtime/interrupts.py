"""Ctrl-C and SIGTERM end everything in bounded time, whatever runs."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

logger = logging.getLogger(__name__)

# Everything is over so long after the signal: by the usual way, or by force.
END_WITHIN_S = 8.0


class Interrupted(SystemExit):
    """A signal asked to end; the exit code is the shell's for it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turns the first SIGINT or SIGTERM into Interrupted in the main thread, ignores later ones.

    What runs is expected to clean up as the exception passes. If that hasn't come to an end in
    time, all child processes are killed and this one ends.
    """
    watchdog = threading.Timer(END_WITHIN_S, kill_everything)
    watchdog.daemon = True

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        watchdog.start()
        raise Interrupted(signal_number)

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        watchdog.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def kill_everything() -> None:
    logger.error("not over %s s after the signal: killing what is left", END_WITHIN_S)
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue  # it ended by itself
    os._exit(1)
