"""The quick forms of the benchmarks that start Lockstep."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def smoke(tmp_path: Path, *command: str) -> dict[str, float]:
    path = tmp_path / "found.json"
    arguments = [*command, "--smoke", f"--json={path}"]
    result = CliRunner().invoke(benchmarks, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    metrics: dict[str, float] = json.loads(path.read_text())["metrics"]
    return metrics


@pytest.mark.full
def test_throughput(tmp_path: Path) -> None:
    metrics = smoke(tmp_path, "throughput")
    assert metrics["output_tokens_per_s_4x16+8"] > 0
    assert metrics["wall_s_min_4x16+8"] <= metrics["wall_s_4x16+8"]


@pytest.mark.full
def test_latency(tmp_path: Path) -> None:
    metrics = smoke(tmp_path, "latency")
    assert metrics["ttft_ms_ours"] > 0
    assert metrics["start_s_cold_local"] > 0
    assert metrics["start_s_warm_local"] > 0


@pytest.mark.full
def test_the_guard_measures_the_engine_beside_its_products(tmp_path: Path) -> None:
    assert smoke(tmp_path, "guard")["speed_4x16+8"] > 0


@pytest.mark.full
@pytest.mark.parametrize("backend", ["grpc", "openai"])
def test_an_open_loop_of_requests(tmp_path: Path, backend: str) -> None:
    metrics = smoke(tmp_path, "serve", f"--backend={backend}", f"--plot={tmp_path / 's.png'}")
    for rate in (4, 8):
        assert metrics[f"failed_{rate}"] == 0
        assert metrics[f"goodput_per_s_{rate}"] == metrics[f"finished_per_s_{rate}"] > 0
        assert metrics[f"ttft_ms_p50_{rate}"] <= metrics[f"e2e_ms_p50_{rate}"]
    assert (tmp_path / "s.png").exists()
