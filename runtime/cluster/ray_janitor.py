"""Ends what a Ray of ours has left running and removes its folder, however its driver went.

A process of its own, run by path: it imports next to nothing. It reads standard input, whose other
end the driver holds, so it acts when the driver says so, or is gone.
"""

import shutil
import sys
import time

import psutil

# In the environment of every process of that Ray: its folder.
MARK = "LOCKSTEP_RAY_FOLDER"

END_TIMEOUT_S = 4.0
POLL_INTERVAL_S = 0.05


def main() -> None:
    folder = sys.argv[1]
    sys.stdin.buffer.read()
    deadline = time.monotonic() + END_TIMEOUT_S
    # Again until none is found: one that is ending may have started another, and they are others'
    # children, of whose end nothing tells. Killed, as they were asked before, or have nobody left
    # who needs them.
    while (processes := belonging_to(folder)) and time.monotonic() < deadline:
        for process in processes:
            _kill(process)
        time.sleep(POLL_INTERVAL_S)
    shutil.rmtree(folder)
    if processes:
        sys.exit(f"still running: {', '.join(map(str, processes))}")


def belonging_to(folder: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _belongs(process, folder)]


def _belongs(process: psutil.Process, folder: str) -> bool:
    """By the mark in its environment, or by its title and the logs it writes.

    Setting a title may overwrite the environment.
    """
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.environ().get(MARK) == folder:
            return True
        titled = any(word.startswith("ray::") for word in process.cmdline())
        return titled and any(file.path.startswith(folder) for file in process.open_files())
    except psutil.Error:  # gone meanwhile, or another user's
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return  # it ended by itself


if __name__ == "__main__":
    main()
