"""Workers that are slow aren't lost: on busy processors, and under a prompt like none before."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.stack import END_S, Server, collect, request
from tests.tiny_models import save_tiny_model
from workers.faults import FOLDER_VARIABLE, Fault, put_fault

pytestmark = [pytest.mark.cluster, pytest.mark.full]

PREFILL_S = 30.0
PROMPT_TOKENS = 1500
BUSY_S = 600.0
NUM_BUSY = 4
LOST = "the workers are lost"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    folder = tmp_path / "faults"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def server(model: Path, faults: Path) -> Iterator[Server]:
    server = Server(
        *(f"--model={model}", "--tp=2", "--launcher=local", "--threads-per-rank=1"),
        "--max-num-batched-tokens=2048",
        **{FOLDER_VARIABLE: str(faults)},
    )
    yield server.wait_until_ready()
    server.kill()


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that want a processor each, all the time."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()


def ask(server: Server, prompt: list[int]) -> list[int]:
    asked = request(prompt, max_tokens=20, ignore_eos=True, seed=1)
    return collect(server.stub().Generate(asked, metadata=server.key)).token_ids


def log_at_end(server: Server) -> str:
    server.process.send_signal(signal.SIGTERM)
    _, log = server.process.communicate(timeout=END_S)
    assert server.process.returncode == 0
    return log


@pytest.mark.timeout(180)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_prefill_of_half_a_minute_is_no_hang(server: Server, faults: Path, rank: int) -> None:
    """Its step is larger than any before, whose times say nothing of it."""
    for length in range(1, 40):
        ask(server, [length] * length)
    slow = Fault(kind="late", seconds=PREFILL_S, min_tokens=PROMPT_TOKENS)
    path = put_fault(faults, rank, slow)
    started = time.monotonic()
    assert len(ask(server, [7] * PROMPT_TOKENS)) == 20
    assert time.monotonic() - started > PREFILL_S
    assert not path.exists()
    assert LOST not in log_at_end(server)


@pytest.mark.nightly
@pytest.mark.timeout(BUSY_S + 300)
def test_busy_processors_are_no_hang(server: Server) -> None:
    expected = ask(server, [1, 2, 3])
    deadline = time.monotonic() + BUSY_S
    with busy(NUM_BUSY):
        while time.monotonic() < deadline:
            assert ask(server, [1, 2, 3]) == expected
            ask(server, [5] * 200)
    assert LOST not in log_at_end(server)
