"""`python -m benchmarks pauses`, in its tiny form."""

import gc
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks

pytestmark = pytest.mark.wire


def test_pauses_are_measured_with_each_collector(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    command = ["pauses", "--smoke", "--json", str(path)]
    gc.unfreeze()  # what a server in this process may have frozen
    before = gc.get_threshold(), gc.get_freeze_count()

    result = CliRunner().invoke(benchmarks, command, catch_exceptions=False)

    assert result.exit_code == 0, result.output
    metrics = json.loads(path.read_text())["metrics"]
    for collector in ("default", "frozen", "swept"):
        median, largest = metrics[f"gap_us_{collector}"], metrics[f"gap_us_max_{collector}"]
        assert 0 < median <= metrics[f"gap_us_p99_{collector}"] <= largest
        assert metrics[f"gap_us_max_quiet_{collector}"] <= largest
    assert metrics["collection_us_in_waits_swept"] > 0
    assert metrics["collection_us_in_waits_frozen"] == 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
