"""What signals do at which moment."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from runtime.interrupts import DrainAsked, Interrupted, drainable, interruptible, until_signal
from tests.ended import ended

pytestmark = pytest.mark.unit

Run = Callable[[Coroutine[Any, Any, None]], object]
# Batches run on the first, frontends on the second.
on_each_loop = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])


def test_a_signal_unwinds_once_and_the_next_is_ignored() -> None:
    unwound: list[int] = []

    def work() -> None:
        with interruptible():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                unwound.append(1)

    with pytest.raises(SystemExit) as exit_info:
        work()
    assert unwound == [1]
    assert exit_info.value.code == 128 + signal.SIGTERM


def test_the_exit_code_is_the_signals_whatever_a_library_makes_of_it() -> None:
    def work() -> None:
        with interruptible():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except SystemExit as interruption:
                raise SystemExit(1) from interruption

    with pytest.raises(SystemExit) as exit_info:
        work()
    assert exit_info.value.code == 128 + signal.SIGINT


def test_what_does_not_unwind_ends_all_the_same() -> None:
    program = """
import runtime.interrupts as interrupts, signal, os, threading
interrupts.END_WITHIN_S = 0.5
with interrupts.interruptible():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        threading.Event().wait()
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 1
    assert "ending at once" in process.stderr


def test_the_first_sigterm_asks_to_drain_and_the_second_ends() -> None:
    seen: list[str] = []

    def serve() -> None:
        with interruptible():
            try:
                with drainable():
                    os.kill(os.getpid(), signal.SIGTERM)
            except DrainAsked:
                seen.append("draining")
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as exit_info:
        serve()
    assert seen == ["draining"]
    assert exit_info.value.code == 128 + signal.SIGTERM


def test_sigint_ends_without_draining() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def serve() -> None:
        with interruptible(), drainable():
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted) as exit_info:
        serve()
    assert exit_info.value.code == 128 + signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) is before


def test_once_it_serves_no_more_sigterm_ends_as_ever() -> None:
    def serve() -> None:
        with interruptible():
            with drainable():
                pass
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        serve()


@on_each_loop
@pytest.mark.parametrize(
    ("signals", "seen"),
    [
        ([signal.SIGTERM], ["drain", "end"]),
        ([signal.SIGTERM, signal.SIGTERM], ["drain", "cancelled"]),
        ([signal.SIGTERM, signal.SIGINT], ["drain", "cancelled"]),
        ([signal.SIGINT], ["cancelled"]),
    ],
)
def test_an_event_loop_drains_at_the_first_sigterm(
    signals: list[signal.Signals], seen: list[str], run: Run
) -> None:
    happened: list[str] = []

    async def work(draining: asyncio.Event) -> None:
        try:
            for number in signals:
                os.kill(os.getpid(), number)
                await draining.wait()
            if len(signals) > 1:
                await asyncio.get_running_loop().create_future()
            happened.append("end")
        except asyncio.CancelledError:
            happened.append("cancelled")
            raise

    async def main() -> None:
        draining = asyncio.Event()

        def drain() -> None:
            happened.append("drain")
            draining.set()

        await ended(until_signal(work(draining), drain))

    run(main())
    assert happened == seen


@on_each_loop
def test_without_a_way_to_drain_sigterm_cancels(run: Run) -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.get_running_loop().create_future()

    run(ended(until_signal(work())))
