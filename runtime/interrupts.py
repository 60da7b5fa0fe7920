"""Ctrl-C and SIGTERM end everything in bounded time, whatever runs."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

# So long may the usual way take. What then is left needs some time to notice.
END_WITHIN_S = 7.0


class Interrupted(SystemExit):
    """A signal asked to end; the exit code is the shell's for it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)


class DrainAsked(BaseException):
    """SIGTERM has come for the first time: what runs may finish, nothing new begins."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Turns the first SIGINT or SIGTERM into Interrupted in the main thread, ignores later ones.

    What runs is expected to clean up as the exception passes. If that hasn't come to an end in
    time, this process ends all the same: its children end with it, each in its own way.
    """
    watchdog = threading.Timer(END_WITHIN_S, end_at_once)
    watchdog.daemon = True
    received: list[int] = []

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        received.append(signal_number)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        watchdog.start()
        raise Interrupted(signal_number)

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    except BaseException as error:
        if not received:
            raise
        # Ray turns our exception into a SystemExit of its own; other libraries into errors.
        if not isinstance(error, SystemExit):
            logger.warning("while ending after a signal: %r", error)
        raise Interrupted(received[0]) from error
    finally:
        watchdog.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def drainable() -> Iterator[None]:
    """Within `interruptible`: the first SIGTERM is DrainAsked, in the main thread, while this runs.

    A second one, and SIGINT at any time, are Interrupted.
    """
    before = signal.getsignal(signal.SIGTERM)

    def ask(signal_number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)
        raise DrainAsked

    signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is ask:
            signal.signal(signal.SIGTERM, before)


async def until_signal(work: Awaitable[None], on_drain: Callable[[], object] | None = None) -> None:
    """Runs `work`, cancelled by SIGINT or SIGTERM; a cancelled one is a good end.

    With `on_drain` the first SIGTERM calls it instead, so that `work` ends by itself.
    For event loops, in which Interrupted would hit whatever runs at that moment.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    if on_drain is not None:
        loop.add_signal_handler(signal.SIGTERM, _drain, task, on_drain)
    try:
        await task
    except asyncio.CancelledError:
        logger.info("ended by a signal")


def _drain(task: "asyncio.Future[None]", on_drain: Callable[[], object]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    logger.info("draining: SIGTERM has come")
    on_drain()


def end_at_once() -> None:
    logger.error("not over %s s after the signal: ending at once", END_WITHIN_S)
    os._exit(1)
