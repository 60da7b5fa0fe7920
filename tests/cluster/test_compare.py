"""`python -m benchmarks compare`: Lockstep beside transformers on a tiny model."""

import json
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks

pytestmark = pytest.mark.cluster


def compare(tmp_path: Path, *peers: str) -> dict[str, float]:
    paths = {name: tmp_path / f"found.{name}" for name in ("json", "png", "md")}
    command = [
        *("compare", "--smoke", *(f"--peer={name}" for name in peers)),
        *(f"--json={paths['json']}", f"--plot={paths['png']}", f"--markdown={paths['md']}"),
    ]
    result = CliRunner().invoke(benchmarks, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    assert "| ours: Lockstep" in paths["md"].read_text()
    document = json.loads(paths["json"].read_text())
    assert len(document["comparisons"]) == len(peers)
    left = [each for each in psutil.Process().children() if "_offline" in str(each.cmdline())]
    assert not left
    metrics: dict[str, float] = document["metrics"]
    return metrics


def test_lockstep_is_compared_with_transformers(tmp_path: Path) -> None:
    metrics = compare(tmp_path, "transformers")
    assert metrics["ratio_transformers_4x16+8"] > 0
    assert metrics["memory_gb_ours_4x16+8_beside_transformers"] > 0
    assert metrics["idle_share_transformers_4x16+8"] == 0


@pytest.mark.full
@pytest.mark.timeout(400)
def test_servers_and_ranks_are_compared_too(tmp_path: Path) -> None:
    peers = ("ours-grpc", "ours-http", "ours-tp2", "transformers-cb")
    metrics = compare(tmp_path, *peers)
    assert all(metrics[f"output_tokens_per_s_{name}_4x16+8"] > 0 for name in peers)
