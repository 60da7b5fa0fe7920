"""`python -m benchmarks soak`, as short as it can be."""

import json
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks
from benchmarks.soak.asks import KINDS

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(300)]


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = ["soak", "--minutes", "0.2", "--json", str(path)]
    result = CliRunner().invoke(benchmarks, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    metrics = json.loads(path.read_text())["metrics"]
    assert metrics["answered"] > len(KINDS)
    assert metrics["left"] > 0
    assert (metrics["failed"], metrics["faults"]) == (0, 0)
    assert metrics["preemptions"] > 0
    assert metrics["probes"] >= 2 * len(KINDS)
    processes = {name for name in metrics if name.startswith("growth_mb_")}
    assert processes == {
        f"growth_mb_{name}" for name in ("driver", "frontend_1", "frontend_2", "rank_0", "rank_1")
    }
    assert not [each for each in psutil.Process().children() if "runtime" in each.cmdline()]
