import secrets
import signal
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from benchmarks import demo
from benchmarks.__main__ import benchmarks
from benchmarks.demo import API_KEY_VARIABLE, DemoError, Timing, figures, served_model
from protos import common_pb2

pytestmark = pytest.mark.wire

SERVER = """
import pathlib, signal, subprocess, sys, tempfile
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
{before}
print("lockstep: serving demo on 127.0.0.1:1234 (gRPC) and http://127.0.0.1:5 (HTTP)", flush=True)
signal.pause()
"""
ORPHAN = 'subprocess.Popen(["sh", "-c", "sleep 60 & "]).wait()'
FILE = 'pathlib.Path(tempfile.gettempdir(), "left.txt").touch()'


def command(before: str = "", code: int = 0) -> list[str]:
    return [sys.executable, "-c", SERVER.format(before=before, code=code)]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, secrets.token_urlsafe())
    monkeypatch.setattr(demo, "GONE_TIMEOUT_S", 0.2)


def test_the_address_comes_from_the_line_that_says_ready(tmp_path: Path) -> None:
    with served_model(command(before='print("something first")'), tmp_path) as address:
        assert address == "127.0.0.1:1234"


@pytest.mark.parametrize(
    ("before", "code", "sentence"),
    [
        (ORPHAN, 0, r"processes left over: \d+ sleep"),
        (FILE, 0, r"temporary files left over: left\.txt"),
        ("", 3, "ended with code 3"),
    ],
)
def test_what_is_wrong_at_the_end_is_named(
    before: str, code: int, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(DemoError, match=sentence), served_model(command(before, code), tmp_path):
        pass
    assert psutil.wait_procs(demo.orphans(), 5)[1] == []


def test_a_server_that_ends_before_it_is_ready_is_an_error(tmp_path: Path) -> None:
    early = [sys.executable, "-c", "raise SystemExit(2)"]
    with pytest.raises(DemoError, match="ended before it was ready"), served_model(early, tmp_path):
        raise AssertionError("not ready, so never here")


def test_an_interrupted_demo_ends_its_server(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), served_model(command(), tmp_path):
        raise KeyboardInterrupt
    assert psutil.wait_procs(demo.orphans(), 5)[1] == []


def test_the_command_says_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise DemoError("processes left over: 7 sleep")

    monkeypatch.setattr(demo, "run", fail)
    before = signal.getsignal(signal.SIGTERM)
    try:
        result = CliRunner().invoke(benchmarks, ["demo"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (result.exit_code, result.output) == (1, "demo: processes left over: 7 sleep\n")


def test_figures() -> None:
    timings = [
        Timing(sent_s=10.0, first_s=10.0 + ttft, last_s=10.0 + ttft + 0.9, num_tokens=10)
        for ttft in (0.1, 0.2, 0.6)
    ]
    before = common_pb2.EngineStats(num_steps=5, num_scheduled_sequences=5)
    after = common_pb2.EngineStats(num_steps=15, num_scheduled_sequences=30)
    line = figures(timings, 2.0, before, after)
    assert line == ("TTFT 200 ms, TPOT 100 ms (medians), 15.0 tokens/s, 10 steps, mean batch 2.5")
