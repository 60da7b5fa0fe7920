"""`lockstep batch` on real processes, killed at any moment."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.batches import line, number_of, read, run, write
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

NUM_LINES = 400
NUM_KILLS = 20
# Slow enough to be killed in the middle.
CHILD = """
import asyncio, sys
from pathlib import Path
from tests.batches import echo, run

async def answer(url, body, request_id):
    await asyncio.sleep(0.02)
    return await echo(url, body, request_id)

print("started", flush=True)
run(Path(sys.argv[1]), answer)
"""
TIMEOUT_S = 60


@pytest.mark.full
def test_every_line_is_answered_once_whenever_it_is_killed(tmp_path: Path) -> None:
    lines = [line(f"id-{number}") for number in range(NUM_LINES)]
    lines[7::50] = ["{"] * len(lines[7::50])
    write(tmp_path / "input.jsonl", lines)
    rng = random.Random(6)
    num_killed = 0
    for _ in range(NUM_KILLS):
        command = [sys.executable, "-c", CHILD, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            try:
                child.wait(rng.uniform(0, 0.12))
            except subprocess.TimeoutExpired:
                child.kill()
                num_killed += 1
    run(tmp_path)
    results = read(tmp_path / "output.jsonl") + read(tmp_path / "errors.jsonl")
    numbers = sorted(number_of(each) for each in results)
    assert numbers == list(range(1, NUM_LINES + 1))
    assert num_killed > NUM_KILLS // 2


NUM_LINES_OF_A_BIG_FILE = 1_000_000
MAX_GROWTH_KIB = 30 << 10
BIG = """
import sys
from pathlib import Path
from tests.batches import run

def kib(name):
    with open("/proc/self/status") as file:
        return next(int(each.split()[1]) for each in file if each.startswith(name))

before = kib("VmRSS")
tally = run(Path(sys.argv[1]))
print(tally.num_before, tally.num_answered, kib("VmHWM") - before)
"""


@pytest.mark.nightly
def test_memory_is_bounded_at_any_file_size(tmp_path: Path) -> None:
    with (tmp_path / "input.jsonl").open("w") as file:
        file.writelines(f"{line(f'id-{number}')}\n" for number in range(NUM_LINES_OF_A_BIG_FILE))
    for num_before in (0, NUM_LINES_OF_A_BIG_FILE):
        command = [sys.executable, "-c", BIG, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
        before, answered, growth_kib = map(int, done.stdout.split())
        assert (before, answered) == (num_before, NUM_LINES_OF_A_BIG_FILE - num_before)
        assert growth_kib < MAX_GROWTH_KIB


NUM_LINES_OF_A_MODEL = 120


def lockstep_batch(model: Path, folder: Path) -> Sequence[str]:
    options = ["--model", str(model), "--launcher", "local", "--kv-memory", "8MiB", "--quiet"]
    files = [str(folder / "input.jsonl"), str(folder / "output.jsonl")]
    return [sys.executable, "-m", "runtime", "batch", *files, *options]


def test_a_killed_batch_is_completed_by_the_same_command(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    body = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    lines = [line(f"id-{number}", body=body) for number in range(NUM_LINES_OF_A_MODEL)]
    lines[5] = "no JSON"
    num_right = len(lines) - 1
    write(tmp_path / "input.jsonl", lines)
    output = tmp_path / "output.jsonl"
    write(output, [])
    command = lockstep_batch(model, tmp_path)
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        while not output.stat().st_size and process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
        process.kill()
    num_before = len(output.read_bytes().splitlines())
    assert 0 < num_before < num_right
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{num_right - num_before} answered" in done.stderr
    answers = read(output)
    assert len(answers) == len({each["custom_id"] for each in answers}) == num_right
    assert {each["response"]["body"]["usage"]["completion_tokens"] for each in answers} == {40}
    (error,) = read(tmp_path / "output.errors.jsonl")
    assert error["line"] == 6
    assert json.loads(lines[0])["custom_id"] in {each["custom_id"] for each in answers}


@pytest.mark.full
def test_a_signal_ends_it_and_the_rest_can_be_done(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    body = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True}
    write(tmp_path / "input.jsonl", [line(f"id-{number}", body=body) for number in range(300)])
    output = tmp_path / "output.jsonl"
    write(output, [])
    command = lockstep_batch(model, tmp_path)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not output.stat().st_size and process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
        process.terminate()
        _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert told.splitlines()[-1] == ("lockstep: interrupted: the same command again does the rest")
    assert 0 < len(read(output)) < 300
