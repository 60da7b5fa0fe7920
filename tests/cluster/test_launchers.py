"""Ranks as real processes: they start, step, die with a word, and leave nothing behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import psutil
import pytest

from runtime.cluster.epochs import Epochs
from runtime.config import EngineConfig
from runtime.errors import ConfigError, WorkerError
from tests.quick import full, quick
from tests.rank_groups import MARK, START_S, marked, ranks, ready_executor, small_plan, started
from tests.steps import execute
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

DEATH_S = 2.0
END_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def forks() -> list[str]:
    """Where this process is copied: a copy of gRPC's threads may die before it is another program.

    What becomes one at once isn't here.
    """
    threads: list[str] = []
    os.register_at_fork(before=lambda: threads.append(threading.current_thread().name))
    return threads


@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("launcher", quick(["local", "ray"], "local"))
def test_two_ranks_load_and_step_and_leave_nothing(
    launcher: str, model: str, temporary_folder: Path, forks: list[str]
) -> None:
    forks.clear()
    seen: list[tuple[int, int]] = []
    handler = signal.getsignal(signal.SIGTERM)
    home_of_ray = Path.home() / ".ray"
    had_home = home_of_ray.exists()

    with started(model, launcher, lambda *progress: seen.append(progress)) as group:
        executor = ready_executor(group)
        results = [execute(executor, small_plan(step_id)) for step_id in (1, 2)]
        assert len(ranks()) == 2
        assert signal.getsignal(signal.SIGTERM) == handler
    group.close()

    assert forks == []
    assert results[0].token_ids == results[1].token_ids
    assert results[0].sequence_ids == [5]
    loaded, total = seen[-1]
    assert loaded == total > 0
    assert list(temporary_folder.iterdir()) == []
    assert home_of_ray.exists() == had_home


@pytest.mark.full
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_dead_rank_is_known_at_once(launcher: str, model: str) -> None:
    heard = threading.Event()
    errors: list[WorkerError] = []

    with started(model, launcher) as group:
        executor = ready_executor(group)
        execute(executor, small_plan(1))
        group.on_lost(lambda error: (errors.append(error), heard.set()))
        ranks()[0].kill()

        assert heard.wait(DEATH_S)
        with pytest.raises(WorkerError, match="step 2 failed: rank"):
            execute(executor, small_plan(2))

    assert "is gone" in str(errors[0])


@pytest.mark.full
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_while_it_loads_is_told_for_what_its_peer_misses(
    rank: int, model: str
) -> None:
    """The peer's dry run fails in a collective, as if the model's parts didn't fit together."""
    killed: list[psutil.Process] = []

    def kill(loaded: int, total: int) -> None:
        if not killed:
            killed.append(ranks()[rank])
            killed[0].kill()

    said = "is gone: killed by signal 9"
    with pytest.raises(WorkerError, match=said), started(model, "local", kill) as group:
        ready_executor(group)


@pytest.mark.full
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_folder_that_is_no_model_is_refused_in_the_workers_words(
    launcher: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(ConfigError, match=str(tmp_path)),
        started(str(tmp_path), launcher),
    ):
        pass


@pytest.mark.usefixtures("no_process_left")
def test_workers_that_take_too_long_are_ended(model: str) -> None:
    config = EngineConfig(launcher="local", tp=2, startup_timeout_s=0.2)
    late = r"rank 0, 1 did not start within startup_timeout_s=0.2"
    with pytest.raises(WorkerError, match=late), Epochs(config, model) as epochs:
        epochs.start(lambda loaded, total: None)


@pytest.mark.full
def test_a_worker_whose_stdin_ends_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "workers.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "LOCKSTEP_WORKER_TOKEN": "any"},
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert json.loads(worker.stdout.readline())["port"] > 0

        worker.stdin.close()

        assert worker.wait(DEATH_S) == 1


DRIVER = """
import select, sys
from runtime.cluster.epochs import Epochs
from runtime.config import EngineConfig

config = EngineConfig(launcher=sys.argv[2], tp=2, threads_per_rank=1, startup_timeout_s=60)
on_progress = lambda loaded, total: print("loading", flush=True)
print("starting", flush=True)
with Epochs(config, sys.argv[1]) as epochs:
    epochs.start(on_progress)
    print("started", flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        pass  # a signal that comes just before a wait is seen after it
"""


@pytest.mark.parametrize(
    ("launcher", "moment", "number"),
    [
        ("local", "starting", signal.SIGINT),
        full(("local", "loading", signal.SIGINT)),
        full(("local", "started", signal.SIGINT)),
        ("local", "started", signal.SIGKILL),
        full(("ray", "starting", signal.SIGINT)),
        full(("ray", "loading", signal.SIGINT)),
        full(("ray", "started", signal.SIGKILL)),
    ],
)
def test_nothing_outlives_the_driver(
    launcher: str, moment: str, number: signal.Signals, model: str, temporary_folder: Path
) -> None:
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, model, launcher],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, MARK: mark},
    ) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.strip() == moment:
                break
        driver.send_signal(number)
        driver.wait(START_S)
        _, alive = psutil.wait_procs(marked(mark), END_S)

    assert alive == []
    assert list(temporary_folder.iterdir()) == []
