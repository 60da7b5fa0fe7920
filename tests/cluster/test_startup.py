"""What can't be served is refused in a sentence, and signals end everything at any moment."""

import json
import os
import signal
import socket
import time
from itertools import product
from pathlib import Path

import pytest

from tests.cluster.stack import START_S, Server
from tests.quick import quick
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def refusal(*options: str) -> str:
    """Starts a server that must refuse; returns what it says."""
    server = Server(*options)
    _, errors = server.process.communicate(timeout=START_S)
    server.temporary_folder.rmdir()
    assert server.process.returncode == 2, errors
    assert "Traceback" not in errors
    return errors.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"))


def test_unknown_folder() -> None:
    assert "/no/such/model" in refusal("--model=/no/such/model", "--launcher=local")


def test_folder_without_config(tmp_path: Path) -> None:
    line = refusal(f"--model={tmp_path}", "--launcher=local")
    assert str(tmp_path) in line
    assert "config.json" in line


def test_truncated_weights(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    line = refusal(f"--model={tmp_path}", "--launcher=local")
    assert "model.safetensors" in line
    assert "truncated" in line


@pytest.mark.full
def test_missing_shard(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    missing = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / missing).unlink()
    line = refusal(f"--model={tmp_path}", "--launcher=local")
    assert missing in line
    assert "missing" in line


@pytest.mark.full
def test_heads_that_do_not_divide(llama: Path) -> None:
    line = refusal(f"--model={llama}", "--launcher=local", "--tp=3")
    assert "4 attention heads can't be split over tp=3" in line


@pytest.mark.full
def test_no_plan(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gpt2")
    line = refusal(f"--model={tmp_path}", "--launcher=local", "--tp=2")
    assert "GPT2LMHeadModel has no tensor-parallel plan: serve it with --tp 1" in line


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port={port}" in refusal(f"--port={port}")


@pytest.mark.full
def test_more_kv_memory_than_there_is(llama: Path) -> None:
    line = refusal(f"--model={llama}", "--launcher=local", "--kv-memory=900TiB")
    assert f"kv_memory={900 << 40} bytes is more than the" in line


@pytest.mark.full
def test_less_kv_memory_than_a_block(llama: Path) -> None:
    line = refusal(f"--model={llama}", "--launcher=local", "--kv-memory=100")
    assert "kv_memory=100 bytes holds 0 blocks" in line


@pytest.mark.full
@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_that_serves(llama: Path, with_signal: signal.Signals) -> None:
    server = Server(f"--model={llama}", "--launcher=local", "--tp=2").wait_until_ready()
    assert len(server.family) == 3  # two ranks and a frontend
    assert server.stop(with_signal) == 0
    assert server.survivors() == []


MOMENTS_S = (0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0)


@pytest.mark.parametrize(
    ("moment_s", "launcher", "with_signal"),
    quick(
        product(MOMENTS_S, ["local", "ray"], [signal.SIGINT, signal.SIGTERM]),
        *((2.0, "local", signal.SIGINT), (2.0, "ray", signal.SIGTERM)),
    ),
)
def test_a_signal_at_any_moment_of_start_up(
    llama: Path, launcher: str, moment_s: float, with_signal: signal.Signals
) -> None:
    server = Server(f"--model={llama}", f"--launcher={launcher}", "--tp=2")
    until = time.monotonic() + moment_s
    while time.monotonic() < until and server.process.poll() is None:
        server.remember_family()
    code = server.stop(with_signal)
    # 0: it served already. Before Python runs our code, the signal ends the interpreter itself.
    assert code in (0, 128 + with_signal, -with_signal)
    assert server.survivors() == []
