"""`python -m benchmarks publish`, in its tiny form: its frontends are processes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks

pytestmark = pytest.mark.cluster


@pytest.mark.full
def test_the_cost_of_publishing_is_measured_at_each_pace(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = ["publish", "--smoke", "--json", str(path)]
    result = CliRunner().invoke(benchmarks, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    metrics = json.loads(path.read_text())["metrics"]
    assert metrics.keys() == {
        f"publish_us_{pace}{figure}"
        for pace in ("at_once", "slowly", "not_at_all")
        for figure in ("", "_p99", "_max")
    }
    assert all(value > 0 for value in metrics.values())
