"""Helper processes: what they print, how they end, and that they never outlive the call."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from runtime.helper_process import Outcome, run_helper

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]

ENDLESS = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


class Helper:
    """A module of ours, as far as the interpreter is concerned."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.setenv("PYTHONPATH", str(folder))

    def run(
        self,
        script: str,
        *arguments: str,
        on_line: Callable[[str], object] = lambda line: None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> Outcome:
        (self._folder / "the_helper.py").write_text(script)
        return run_helper(
            "the_helper",
            arguments,
            on_line=on_line,
            environment=environment or {},
            timeout_s=timeout_s,
            pass_fds=pass_fds,
        )


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Helper:
    return Helper(tmp_path, monkeypatch)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_lines_arguments_and_exit_code(helper: Helper) -> None:
    heard: list[str] = []
    script = (
        "import sys; print(*sys.argv[1:], flush=True); print('aside', file=sys.stderr); sys.exit(3)"
    )
    outcome = helper.run(script, "a", "b c", on_line=heard.append)
    assert outcome == Outcome(3, ["a b c", "aside"], timed_out=False)
    assert heard == outcome.lines


def test_the_end_of_a_good_helper(helper: Helper) -> None:
    assert helper.run("") == Outcome(0, [], timed_out=False)


def test_a_signal_is_a_negative_code(helper: Helper) -> None:
    outcome = helper.run("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert outcome == Outcome(-signal.SIGTERM, [], timed_out=False)


def test_lines_come_as_they_are_printed(helper: Helper, tmp_path: Path) -> None:
    """The helper waits for what the caller does on hearing its first line."""
    fifo = tmp_path / "answer"
    os.mkfifo(fifo)

    def answer(line: str) -> None:
        if line == "ready":
            fifo.write_text("go on")

    script = f"print('ready', flush=True); print(open({str(fifo)!r}).read())"
    assert helper.run(script, on_line=answer).lines == ["ready", "go on"]


def test_bytes_that_are_no_text_are_replaced(helper: Helper) -> None:
    script = r"import sys; sys.stdout.buffer.write(b'half \xff word\n')"
    assert helper.run(script).lines == ["half \ufffd word"]


def test_the_environment_comes_on_top_of_ours(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "kept")
    monkeypatch.setenv("BOTH", "ours")
    script = "import os; print(os.environ['OURS'], os.environ['BOTH'], os.environ['ITS'])"
    outcome = helper.run(script, environment={"BOTH": "its", "ITS": "own"})
    assert outcome.lines == ["kept its own"]
    assert os.environ["BOTH"] == "ours"


def test_it_has_a_session_of_its_own(helper: Helper) -> None:
    assert helper.run("import os; print(os.getsid(0) == os.getpid())").lines == ["True"]


CALLER = """
from runtime.helper_process import run_helper
run_helper("{module}", [], on_line=lambda line: print(line, flush=True), environment={{}})
"""
FOLLOWER = """
import os, threading
from workers.caller import end_with_caller
end_with_caller()
print(os.getpid(), flush=True)
threading.Event().wait()
"""


def test_it_ends_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "endless_helper.py").write_text(FOLLOWER)
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER.format(module="endless_helper")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    with caller:
        assert caller.stdout is not None
        helper = psutil.Process(int(caller.stdout.readline()))
        caller.kill()
    helper.wait(timeout=20)  # raises where it lives on


def test_files_of_the_current_folder_are_not_imported(
    helper: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "json.py").write_text("raise SystemExit('a foreign json')")
    monkeypatch.chdir(here)
    assert helper.run("import json; print(json.dumps([1]))").lines == ["[1]"]


def test_only_the_passed_files_stay_open(helper: Helper) -> None:
    pairs = [os.pipe(), os.pipe()]
    try:
        (passed, _), (kept, _) = pairs
        script = (
            "import os, sys\n"
            "os.fstat(int(sys.argv[1]))\n"
            "try: os.fstat(int(sys.argv[2]))\n"
            "except OSError: print('closed')\n"
        )
        outcome = helper.run(script, str(passed), str(kept), pass_fds=(passed,))
    finally:
        for end in (*pairs[0], *pairs[1]):
            os.close(end)
    assert outcome == Outcome(0, ["closed"], timed_out=False)


@pytest.mark.parametrize(
    "script",
    [
        ENDLESS,
        "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ENDLESS,
        "import os; print(os.getpid(), flush=True)\nos.close(1); os.close(2)\nwhile True: pass",
    ],
    ids=["waits", "ignores-sigterm", "says-no-more"],
)
def test_a_timeout_kills(helper: Helper, script: str) -> None:
    start = time.monotonic()
    outcome = helper.run(script, timeout_s=1.0)
    assert outcome.timed_out
    assert outcome.code == -signal.SIGKILL
    assert 1.0 <= time.monotonic() - start < 30.0
    assert not is_alive(int(outcome.lines[0]))


def test_a_timeout_also_ends_what_the_helper_started(helper: Helper) -> None:
    """It has the helper's output too: the call would wait for it."""
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ENDLESS!r}])"
    outcome = helper.run(script, timeout_s=1.0)
    assert outcome.timed_out
    assert len(outcome.lines) == 1


def test_who_ends_in_time_is_left_alone(helper: Helper) -> None:
    assert helper.run("print('soon')", timeout_s=60.0) == Outcome(0, ["soon"], timed_out=False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_interrupted_caller_ends_it(helper: Helper, error: type[BaseException]) -> None:
    heard: list[str] = []

    def interrupt(line: str) -> None:
        heard.append(line)
        raise error

    with pytest.raises(error):
        helper.run(ENDLESS, on_line=interrupt, timeout_s=60.0)
    assert not is_alive(int(heard[0]))


def test_one_that_clings_to_life_is_killed(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.helper_process.TERMINATE_TIMEOUT_S", 0.2)
    heard: list[str] = []

    def interrupt(line: str) -> None:
        heard.append(line)
        raise KeyboardInterrupt

    script = "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ENDLESS
    with pytest.raises(KeyboardInterrupt):
        helper.run(script, on_line=interrupt)
    assert not is_alive(int(heard[0]))


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        (Outcome(1, ["a", "error: the disk is full"], timed_out=False), "the disk is full"),
        (
            Outcome(-9, ["a"], timed_out=False),
            "it was killed, as happens where memory runs out",
        ),
        (Outcome(3, [], timed_out=False), "it ended with code 3 and: nothing"),
        (
            Outcome(-6, list("abcdefg"), timed_out=False),
            "it ended with code -6 and: c\nd\ne\nf\ng",
        ),
    ],
)
def test_the_end_is_described(outcome: Outcome, sentence: str) -> None:
    assert outcome.describe() == sentence
