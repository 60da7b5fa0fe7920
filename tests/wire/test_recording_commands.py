"""`lockstep replay` and `lockstep trace`."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from runtime.cli import cli
from runtime.errors import ConfigError, LockstepError
from tests.recording import RecordedEngine, live_at_random

pytestmark = pytest.mark.wire


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    engine = RecordedEngine(folder)
    live_at_random(engine, seed=1, num_requests=10)
    engine.recorder.close()
    return folder


def test_a_scheduler_is_replayed_without_torch(folder: Path) -> None:
    program = """
import sys
from runtime.cli import main
sys.argv = ["lockstep", *sys.argv[1:]]
main()
heavy = {"torch", "transformers", "ray", "workers"} & sys.modules.keys()
sys.exit(", ".join(heavy) or None)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "replay", "--scheduler", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("lockstep: run run from run-0001.rec on: ")
    assert done.stdout.endswith(" steps are planned as recorded\n")


def test_a_difference_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.scheduling.admission.LOOKAHEAD", 0)
    result = invoke("replay", "--scheduler", str(folder))
    assert result.exit_code == 1
    assert "0 steps are planned as recorded" in result.output
    assert isinstance(result.exception, LockstepError)
    assert str(result.exception) == (
        "the first that differs: step 1, all rows: nothing runs, recorded a step"
    )


def test_what_is_to_be_replayed_must_be_said(folder: Path) -> None:
    for arguments in ([], ["--scheduler", "--model", "demo"]):
        result = invoke("replay", *arguments, str(folder))
        assert isinstance(result.exception, ConfigError)
        assert "either --scheduler or --model must be given" in str(result.exception)


def test_steps_that_were_not_recorded_are_not_run(folder: Path) -> None:
    result = invoke("replay", "--model", "demo", str(folder))
    assert isinstance(result.exception, ConfigError)
    assert "record with --record-steps" in str(result.exception)


def test_a_trace_is_written(folder: Path, tmp_path: Path) -> None:
    result = invoke("trace", str(folder), "--output", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"trace.json", "batch.png"}
    assert "sequences in" in result.output


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    for command in (["replay", "--scheduler"], ["trace"]):
        result = invoke(*command, str(tmp_path))
        assert isinstance(result.exception, ConfigError)
        assert "has no recording" in str(result.exception)
