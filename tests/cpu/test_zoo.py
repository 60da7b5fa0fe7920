"""`make zoo` finds what the shipped file says, and fails where its control shows nothing."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from runtime.model_support import RESULTS
from tests.ranks import ROOT
from workers.gate.zoo import MOVED

pytestmark = pytest.mark.cpu

SHIPPED = json.loads(RESULTS.read_text(encoding="utf-8"))
IS_SAME = SHIPPED["transformers"] == version("transformers")
needs_the_version = pytest.mark.skipif(
    not IS_SAME, reason=f"the file is of transformers {SHIPPED['transformers']}: run `make zoo`"
)
# A chunked window, heads that vary by layer, cross attention, experts; two that are refused.
SAMPLE = ("llama4_text", "gemma4", "mllama", "granitemoe", "mamba", "bloom")
LACKING = re.compile(r"library but it was not found|No module named")
NUMBER = re.compile(r"\b\d[\d.e-]*")


def run_zoo(
    *arguments: str | Path, timeout_s: float, program: Sequence[str] = ("-m", "workers.gate.zoo")
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", *program, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        timeout=timeout_s,
        check=False,
    )


def shown(entry: dict[str, Any]) -> dict[str, str]:
    """What must be equal: all but the numbers, whose last digits differ between machines."""
    names = ("model_type", "architecture", "tp1", "tp2", "reason")
    return {name: NUMBER.sub("#", entry[name]) for name in names}


def check(
    process: "subprocess.CompletedProcess[str]", file: Path, types: Sequence[str], kind: str
) -> None:
    """That these types were found to be what the shipped file says under `kind`."""
    assert process.returncode == 0, process.stderr
    printed = [line.split()[0] for line in process.stdout.splitlines()]
    assert set(types) <= set(printed)
    totals = f"{len(types)} types of transformers {version('transformers')} in "
    assert totals in process.stdout
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["transformers"] == version("transformers")
    expected = [shown(entry) for entry in SHIPPED[kind] if entry["model_type"] in types]
    for mine, theirs in zip(map(shown, found[kind]), expected, strict=True):
        # Some types need packages that may be here and weren't there.
        assert mine == theirs or any(LACKING.search(each["reason"]) for each in (mine, theirs))
    for entry in found[kind]:
        assert (entry["moved"] is None) == (entry["tp1"] == "refused")
        assert entry["moved"] is None or entry["moved"] > MOVED


@needs_the_version
@pytest.mark.full
def test_a_sample_is_what_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    process = run_zoo(*SAMPLE, "--json", file, timeout_s=110)
    check(process, file, SAMPLE, "types")
    assert len(process.stdout.splitlines()) == len(SAMPLE) + 1


@pytest.mark.full
@pytest.mark.timeout(1200)
@needs_the_version
def test_all_types_are_what_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    process = run_zoo("--json", file, timeout_s=1100)
    for kind in ("types", "multimodal"):
        check(process, file, [entry["model_type"] for entry in SHIPPED[kind]], kind)


# What becomes of a type whose test hangs, dies, fails or has a control that shows nothing.
SCRIPT = """
import os, signal
from workers.gate import zoo

def judge(config, tp):
    match config.model_type:
        case "mamba":
            signal.alarm(1)  # sooner than it would come
            signal.pause()
        case "bloom":
            os.kill(os.getpid(), signal.SIGKILL)
        case "falcon":
            raise KeyError("odd")
    return zoo_judge(config, tp)

zoo_judge, zoo.judge = zoo.judge, judge
zoo.control = lambda config: 0.001
zoo.main()
"""


@pytest.mark.full
def test_a_control_that_shows_nothing_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    process = run_zoo(
        *("mamba", "bloom", "falcon", "llama", "--json", file),
        program=("-c", SCRIPT),
        timeout_s=110,
    )
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "error: lost blocks went unnoticed in llama"
    assert not file.exists(), "results of a test that can't fail are no results"
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in process.stdout.splitlines()}
    assert lines["llama"] == "equal, tp 2 split"
    assert lines["mamba"] == "refused its test took longer than 120 s"
    assert lines["bloom"] == "refused its test ended with status 9"
    assert lines["falcon"] == "refused its test failed unexpectedly: KeyError: 'odd'"
