"""`python -m benchmarks multinode` in its quick form: two namespaces, ranks inside and across."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks
from benchmarks.multinode.measure import PARTS

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(300)]


def test_ranks_on_one_node_and_on_two_are_measured(tmp_path: Path) -> None:
    path, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    command = ["multinode", "--smoke", "--json", str(path), "--plot", str(picture)]

    result = CliRunner().invoke(benchmarks, command, catch_exceptions=False)

    if "network namespaces" in result.output and result.exit_code == 1:
        pytest.skip(result.output)
    assert result.exit_code == 0, result.output
    metrics = json.loads(path.read_text())["metrics"]
    for case in ("inside", "across"):
        assert metrics[f"tokens_per_s_{case}"] > 0
        assert metrics[f"differing_{case}"] == 0
        assert metrics[f"recovery_s_{case}"] > 0
        assert all(metrics[f"step_ms_{part}_{case}"] >= 0 for part in PARTS)
    assert picture.read_bytes().startswith(b"\x89PNG")
