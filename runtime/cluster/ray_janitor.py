"""Ends what a Ray of ours has left running and removes its folder, however its driver went.

A process of its own, run by path: it imports next to nothing. It reads standard input, whose other
end the driver holds, so it acts when the driver says so, or is gone.
"""

import shutil
import signal
import sys

import psutil

# In the environment of every process of that Ray: its folder.
MARK = "LOCKSTEP_RAY_FOLDER"

END_TIMEOUT_S = 2.0
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
    _, alive = psutil.wait_procs(processes, END_TIMEOUT_S)
    _signal(alive, signal.SIGKILL)
    psutil.wait_procs(alive, END_TIMEOUT_S)


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main()
