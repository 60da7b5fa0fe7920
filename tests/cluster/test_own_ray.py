"""A Ray of our own that doesn't start: told by name, and nothing is left of it."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from runtime.cluster import own_ray as module
from runtime.cluster.own_ray import own_ray
from runtime.errors import WorkerError
from tests.rank_groups import MARK, marked

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(60)]

# In place of Ray where ours is started. Its process stays, whatever becomes of the one that
# started it, as it may be in the middle of anything.
FAKE = """
import os, signal, subprocess, sys
from types import SimpleNamespace

def init(**options):
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    subprocess.Popen(command, start_new_session=True)
    print("of Ray's, not for the driver")
    {init}

def get_runtime_context():
    return SimpleNamespace(gcs_address="127.0.0.1:1")

def shutdown():
    {shutdown}
"""

STARTING = [
    ("signal.pause()", r"Ray did not start within startup_timeout_s=1$"),
    ("raise RuntimeError('no port')", r"Ray did not start: no port$"),
    ("os.abort()", r"Ray did not start: its first process ended with code -6$"),
]


@pytest.fixture
def fake(no_process_left: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file that is Ray's there; afterwards nothing is left of it."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path / "ray.py"
    assert marked(mark) == []


@pytest.mark.parametrize(("init", "said"), STARTING)
def test_a_ray_that_does_not_start_leaves_nothing(
    init: str, said: str, fake: Path, temporary_folder: Path
) -> None:
    fake.write_text(FAKE.format(init=init, shutdown="pass"))

    with pytest.raises(WorkerError, match=said), own_ray(num_cpus=2, startup_timeout_s=1):
        pass

    assert list(temporary_folder.iterdir()) == []
    assert module.TOLD not in os.environ


def test_a_ray_that_cannot_be_joined_leaves_nothing(
    fake: Path, temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(address: str, **options: object) -> None:
        raise ConnectionError(f"nobody at {address}")

    fake.write_text(FAKE.format(init="pass", shutdown="pass"))
    monkeypatch.setattr(ray, "init", init)

    said = r"Ray started but can't be joined: nobody at 127\.0\.0\.1:1$"
    with pytest.raises(WorkerError, match=said), own_ray(num_cpus=2, startup_timeout_s=30):
        pass

    assert list(temporary_folder.iterdir()) == []
    assert module.TOLD not in os.environ


def test_a_ray_that_does_not_end_is_ended(
    fake: Path, temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.write_text(FAKE.format(init="pass", shutdown="signal.pause()"))
    monkeypatch.setattr(module, "HEAD_TIMEOUT_S", 0.1)
    monkeypatch.setattr(ray, "init", lambda **options: None)

    with own_ray(num_cpus=2, startup_timeout_s=30):
        assert module.TOLD in os.environ

    assert list(temporary_folder.iterdir()) == []
