"""`python -m benchmarks simulate`, and its comparison with a live run."""

import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks
from benchmarks.simulate.cases import LIMITS, NOT_LIMITS
from benchmarks.simulate.cost import CostModel
from benchmarks.simulate.executor import SimulatedExecutor, VirtualClock
from benchmarks.simulate.hardware import GPUS
from benchmarks.simulate.measure import CALIBRATION_CHUNK, CALIBRATION_ROWS, fit, run_live
from benchmarks.simulate.model_shape import PRESETS
from benchmarks.simulate.workload import write_trace
from runtime.config import EngineConfig
from tests.simulation import FLOOR, decode_step, lens, make_deployment, request

pytestmark = pytest.mark.unit


def test_the_fit_recovers_the_overheads() -> None:
    shape, h200 = PRESETS["gemma-3-270m"], GPUS["H200"]
    true = replace(FLOOR, overhead_us=700.0, row_overhead_us=90.0, token_overhead_us=3.0)
    cost = CostModel(shape, h200, constants=true)
    points = {
        (rows, 1): decode_step(cost, rows=rows, context=81).total_s for rows in CALIBRATION_ROWS
    }
    chunk = CALIBRATION_CHUNK
    points[1, chunk] = cost.step(lens(0), lens(chunk), num_samples=1).total_s
    fitted = fit(CostModel(shape, h200, constants=FLOOR), points)
    assert fitted.overhead_us == pytest.approx(700)
    assert fitted.row_overhead_us == pytest.approx(90)
    assert fitted.token_overhead_us == pytest.approx(3)


def test_a_live_run_logs_every_request() -> None:
    deployment = make_deployment()
    clock = VirtualClock()
    engine = deployment.make_engine(SimulatedExecutor(deployment.cost, clock), clock)
    engine.start()
    try:
        log = run_live(engine, [request(0.0, output=4), request(0.001, output=1)], seed=0)
    finally:
        engine.stop()
    assert log.finished.all()
    assert (log.ttft_s > 0).all()
    assert len(log.itl_s) == 3


def simulate(*arguments: str) -> str:
    command = ["simulate", "--smoke", "--model", "qwen3-0.6b", "--kv-memory", "1GiB", *arguments]
    if "--trace" not in arguments:
        command += ["--output-median", "40", "--output-p95", "80"]
    result = CliRunner().invoke(benchmarks, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_every_field_of_the_configuration_is_a_limit_or_not() -> None:
    assert set(LIMITS) | NOT_LIMITS == {field.name for field in fields(EngineConfig)}


def test_smoke(tmp_path: Path) -> None:
    json_path, png_path = tmp_path / "out.json", tmp_path / "sweep.png"
    output = simulate(
        *("--rate", "4", "--rate", "20.5", "--max-num-seqs", "8", "--prefix-share", "0.5"),
        *("--overhead-us", "1234", "--json", str(json_path), "--plot", str(png_path)),
    )
    for part in ("1234", "qwen3-0.6b", "TTFT", "goodput/s", "preemptions", "prefix hit %"):
        assert part in output
    metrics = json.loads(json_path.read_text())["metrics"]
    assert metrics["rate_4_ttft_p99_ms"] > 0
    assert metrics["rate_20.5_prefix_hit_rate"] > 0
    assert metrics["rate_4_tpot_p50_ms"] > 1.234
    assert png_path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_smoke_finds_replicas_for_each_varied_limit(tmp_path: Path) -> None:
    json_path = tmp_path / "out.json"
    output = simulate(
        *("--rate", "200", "--find-replicas", "--tpot-slo-ms", "4", "--ttft-slo-ms", "100"),
        *("--tp", "2", "--vary", "max_num_seqs=2,8", "--json", str(json_path)),
    )
    metrics = json.loads(json_path.read_text())["metrics"]
    few, many = (metrics[f"max_num_seqs_{count}_rate_200_replicas"] for count in (2, 8))
    assert few > many >= 1
    assert metrics["max_num_seqs_2_rate_200_gpus"] == 2 * few
    assert f"{few} replicas, {2 * few} GPUs, meet the SLOs" in output
    assert f"{few - 1} meet them for" in output


def test_smoke_with_a_trace(tmp_path: Path) -> None:
    trace, json_path = tmp_path / "trace.jsonl", tmp_path / "out.json"
    simulate("--rate", "5", "--save-trace", str(trace), "--json", str(json_path))
    drawn = json.loads(json_path.read_text())["metrics"]
    simulate("--trace", str(trace), "--json", str(json_path))
    traced = json.loads(json_path.read_text())["metrics"]
    assert traced["trace_ttft_p50_ms"] == drawn["rate_5_ttft_p50_ms"]
    assert traced.keys() == {name.replace("rate_5", "trace") for name in drawn}


def test_figures_without_a_value_are_left_out(tmp_path: Path) -> None:
    trace, json_path = tmp_path / "trace.jsonl", tmp_path / "out.json"
    write_trace(trace, [request(0.0)])
    simulate("--trace", str(trace), "--json", str(json_path))
    metrics = json.loads(json_path.read_text())["metrics"]
    assert "trace_ttft_p50_ms" in metrics
    assert "trace_tpot_p50_ms" not in metrics


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "0"), "rate=0.0 must be more than 0"),
        (("--rate", "1", "--trace", "x"), "--rate doesn't go with --trace"),
        (("--prompt-p95", "900", "--trace", "x"), "--prompt-p95 doesn't go with --trace"),
        (("--measure",), "--smoke doesn't go with --measure"),
        (("--vary", "colour=1"), "must be a limit and its values"),
        (("--vary", "max_num_seqs=few"), "'few' is not a valid integer"),
        (("--max-num-seqs", "9999"), "must be at least max_num_seqs=9999"),
        (("--rate", "1", "--rate", "2", "--save-trace", "x"), "save_trace takes one rate"),
        (("--prompt-median", "9000"), "lengths must rise"),
        (("--plot", "x.png", "--vary", "tp=1,2"), "--vary doesn't go with --plot"),
    ],
)
def test_wrong_options_are_told(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(benchmarks, ["simulate", "--smoke", *arguments])
    assert result.exit_code != 0
    assert message in result.output


def test_a_plot_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command = ["simulate", "--smoke", "--plot", str(tmp_path / "x.png")]
    result = CliRunner().invoke(benchmarks, command)
    assert result.exit_code != 0
    assert "lockstep-serving[bench]" in result.output
