"""A process and all that it started: memory, time on the processors, standing still."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil


def processes_of(pid: int) -> list[psutil.Process]:
    """It first, then its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def memory_bytes(pid: int) -> int:
    """Proportional set size of the tree: shared pages count once, whoever shares them."""
    total = 0
    for process in processes_of(pid):
        # One that ended in between holds nothing.
        with suppress(FileNotFoundError, ProcessLookupError):
            total += _pss_bytes(Path(f"/proc/{process.pid}/smaps_rollup").read_text("ascii"))
    return total


def _pss_bytes(rollup: str) -> int:
    for line in rollup.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0  # a process without pages of its own: it ends


def cpu_s(pid: int) -> float:
    """Of the tree's processes that are there now, in user and kernel mode."""
    total = 0.0
    for process in processes_of(pid):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def stop(pid: int) -> None:
    """Lets none of them run until `go_on`."""
    _for_each(processes_of(pid), psutil.Process.suspend)


def go_on(pid: int) -> None:
    _for_each(processes_of(pid), psutil.Process.resume)


def kill(pid: int) -> None:
    _for_each(processes_of(pid), psutil.Process.kill)


def _for_each(processes: Sequence[psutil.Process], act: Callable[[psutil.Process], object]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            act(process)
