"""`python -m tests.crashing_driver ADDRESS MODEL STAGE VICTIM`: a driver that meets a crash.

Starts two ranks on the Ray at ADDRESS and has them run a step. At STAGE one of them is killed
(VICTIM rank), or the driver (VICTIM driver). Ends with 0 where it was told of the lost rank.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

import psutil

from runtime.cluster.epochs import Epochs
from runtime.cluster.ray_launcher import RayLauncher
from runtime.cluster.worker_client import WorkerClient
from runtime.config import EngineConfig
from runtime.errors import WorkerError
from tests.rank_groups import ready_executor, small_plan
from tests.steps import execute

STAGES = ("launch", "rendezvous", "load", "allocate", "step")
START_S = 60.0
LOOK_S = 0.05


def ranks() -> list[psutil.Process]:
    """The processes in this network namespace that hold a rank, or are about to."""
    here = os.readlink("/proc/self/ns/net")
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            is_rank = "WorkerActor" in "".join(process.info["cmdline"] or ())
            if is_rank and os.readlink(f"/proc/{process.pid}/ns/net") == here:
                found.append(process)
        except OSError:  # gone meanwhile
            continue
    return found


def kill_rank() -> None:
    """Kills the first there is; Ray starts them in its own time."""
    pause = threading.Event()
    for _ in range(int(START_S / LOOK_S)):
        found = ranks()
        if found:
            found[0].kill()
            return
        pause.wait(LOOK_S)
    sys.exit("no rank was started")


def kill_driver() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash_before(owner: type, name: str, crash: Callable[[], None]) -> None:
    """Has a method crash first."""
    method = getattr(owner, name)

    def crashing(*args: object, **options: object) -> object:
        crash()
        return method(*args, **options)

    setattr(owner, name, crashing)


def live(epochs: Epochs, stage: str, crash: Callable[[], None]) -> None:
    has_crashed = threading.Event()

    def on_progress(loaded: int, total: int) -> None:
        if stage == "load" and not has_crashed.is_set():
            has_crashed.set()
            crash()

    epochs.start(on_progress)
    if stage == "allocate":
        crash()
    executor = ready_executor(epochs.group)
    for step_id in (1, 2):
        execute(executor, small_plan(step_id))
        if stage == "step":
            crash()


def main() -> None:
    address, model, stage, victim = sys.argv[1:]
    crash = {"rank": kill_rank, "driver": kill_driver}[victim]
    if stage == "launch":
        crash_before(RayLauncher, "_start", crash)
    if stage == "rendezvous":
        crash_before(WorkerClient, "open_rendezvous", crash)
    config = EngineConfig(
        launcher="ray",
        ray_address=address,
        tp=2,
        threads_per_rank=1,
        check_ranks=True,
        startup_timeout_s=START_S,
    )
    try:
        with Epochs(config, model) as epochs:
            live(epochs, stage, crash)
    except WorkerError as error:
        print(f"told: {error}")
        return
    sys.exit("a rank was killed, and nobody noticed")


if __name__ == "__main__":
    main()
