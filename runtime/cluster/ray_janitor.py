"""Ends what a Ray of ours has left running and removes its folder, however its driver went.

A process of its own, run by path: it imports next to nothing. It reads standard input, whose other
end the driver holds, so it acts when the driver says so, or is gone.
"""

import shutil
import signal
import sys
import time

import psutil

# In the environment of every process of that Ray: its folder.
MARK = "LOCKSTEP_RAY_FOLDER"

END_TIMEOUT_S = 2.0
POLL_INTERVAL_S = 0.05
MAX_ROUNDS = 3


def main() -> None:
    folder = sys.argv[1]
    sys.stdin.buffer.read()
    # Again, as one that is ending may have started another.
    for _ in range(MAX_ROUNDS):
        processes = _marked(folder)
        if not processes:
            break
        _end(processes)
    shutil.rmtree(folder)


def _marked(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == folder:
                found.append(process)
        # Gone meanwhile, or another user's.
        except psutil.Error:
            continue
    return found


def _end(processes: list[psutil.Process]) -> None:
    _signal(processes, signal.SIGTERM)
    alive = _wait(processes)
    _signal(alive, signal.SIGKILL)
    _wait(alive)


def _wait(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Returns those that still run after END_TIMEOUT_S.

    By asking again and again: they are others' children, of whose end nothing tells, and one that
    their parent doesn't reap stays in the table as a zombie.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    while alive := [process for process in processes if _runs(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_INTERVAL_S)
    return alive


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main()
