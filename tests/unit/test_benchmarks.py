"""`python -m benchmarks`: its commands, its report, the scheduler's cases in their tiny form."""

import ast
import gc
import json
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks
from benchmarks.report import Figures, machine_facts, percentile, print_table, write_json
from benchmarks.scheduler.cases import AdmitCase, DecodeCase, to_json
from benchmarks.scheduler.cli import decode_cases
from benchmarks.scheduler.ours import measure_admit, measure_decode
from benchmarks.scheduler.peer import SCRIPT, VllmPeer
from benchmarks.scheduler.results import Results
from benchmarks.scheduler.timing import Measurement, collector_watched, frozen_heap

pytestmark = pytest.mark.unit

DECODE = DecodeCase(running=4, waiting=3, prefix_cache=True, block_size=16, context=40, num_steps=8)
# Answers every case with the same times, as vLLM's script would.
PEER = """
import json, sys
for line in sys.stdin:
    case = json.loads(line)
    decode = case["kind"] == "decode"
    names = ["schedule", "update"] if decode else ["build", "add", "schedule", "update", "finish"]
    count = case["num_steps"] if decode else case["num_rounds"]
    times = {name: [1e9] * count for name in names}
    print(json.dumps({"phases": times, "gc_pauses": [], "full_gc_us": 1.0}), flush=True)
"""


def fake_python(folder: Path, script: str) -> Path:
    """An executable that runs `script`, whatever it is given."""
    (folder / "script.py").write_text(script)
    executable = folder / "python"
    executable.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "script.py"}"\n')
    executable.chmod(0o755)
    return executable


def run_smoke(folder: Path, *arguments: str) -> tuple[dict[str, float], str]:
    """The metrics and what was printed."""
    path = folder / "figures.json"
    command = ["scheduler", "--smoke", "--json", str(path), *arguments]
    result = CliRunner().invoke(benchmarks, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document.keys() == {"metrics", "machine"}
    return document["metrics"], result.output


def test_every_command_is_there_and_says_what_it_does() -> None:
    result = CliRunner().invoke(benchmarks, ["--help"], catch_exceptions=False)
    shown = " ".join(result.output.split())
    for line in ("demo Serve the embedded", "scheduler Time schedule", "simulate ", "make-model "):
        assert line in shown
    assert CliRunner().invoke(benchmarks, ["nothing"]).exit_code == 2


def test_a_cell_has_one_metric_for_each_figure(tmp_path: Path) -> None:
    metrics, output = run_smoke(tmp_path)
    cells = [
        f"4_running_{ending}"
        for ending in ("0_waiting", "3_waiting", "0_waiting_hybrid")
        for ending in (ending, f"{ending}_no_prefix_cache")
    ]
    percentiles = ("", "_p99", "_max", "_p99_undisturbed", "_max_undisturbed", "_disturbed")
    figures = (*percentiles, "_gc_pauses", "_gc_total", "_gc_longest")
    hits = ("", "_no_prefix_cache", "_evicting", "_hits")
    assert metrics.keys() == {
        *(f"step_us_{cell}{figure}" for cell in cells for figure in figures),
        *(f"full_gc_us_{cell}" for cell in cells),
        *(f"admit_{part}2x128_us{ending}" for part in ("", "build_", "rest_") for ending in hits),
        *(f"admit_2x128_us{ending}_{kind}disturbed" for kind in ("", "un") for ending in hits),
        "prefix_cache_ratio_4_running",
        "prefix_cache_ratio_4_running_hybrid",
        "hash_ns_per_token",
        "block_size",
        "repeats",
    }
    assert metrics["block_size"] == 16
    cell = "step_us_4_running_3_waiting"
    assert 0 < metrics[cell] <= metrics[f"{cell}_p99"] <= metrics[f"{cell}_max"]
    assert "A decode step, us" in output


@pytest.mark.full
def test_beside_vllm_both_use_its_block_size_and_ratios_are_ours_over_theirs(
    tmp_path: Path,
) -> None:
    metrics, output = run_smoke(tmp_path, "--vllm", str(fake_python(tmp_path, PEER)))
    assert metrics["block_size"] == 32
    assert metrics["vllm_step_us_4_running_0_waiting"] == 2e9
    assert metrics["vllm_admit_2x128_us"] == 2e9
    for name in ("4_running_3_waiting_no_prefix_cache", "admit_2x128_us_hits"):
        assert 0 < metrics[f"ratio_vllm_{name}"] < 0.01
    assert "ratio_vllm_4_running_0_waiting_hybrid" not in metrics
    assert "ratio" in output


def test_a_peer_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    python = fake_python(tmp_path, 'raise SystemExit("no vLLM here")')
    with VllmPeer(python) as peer, pytest.raises(click.ClickException) as caught:
        peer.measure(DECODE)
    assert caught.value.message == f"--vllm {python}: ended with code 1\nno vLLM here"


def test_a_peer_gets_all_that_the_case_says(tmp_path: Path) -> None:
    echo = fake_python(
        tmp_path,
        'import json\nprint(json.dumps({"phases": {"case": json.loads(input())}}), flush=True)\n',
    )
    with VllmPeer(echo) as peer:
        case = peer.measure(DECODE).phases["case"]
    assert case == to_json(DECODE)
    assert case["kind"] == "decode"


def test_the_peers_script_imports_nothing_of_ours() -> None:
    imported = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            imported.add(node.module.partition(".")[0])
    assert "vllm" in imported
    assert not imported & {"benchmarks", "runtime", "workers", "protos", "tests"}


def test_ratios_are_of_the_runs_in_turn_not_of_all_together() -> None:
    results = Results()
    for ours, theirs in ((1.0, 10.0), (2.0, 4.0), (30.0, 100.0)):
        times = {"schedule": [ours], "flatten": [0.0]}
        results.ours[DECODE].append(Measurement(times, disturbed=[ours == 30.0]))
        results.vllm[DECODE].append(Measurement({"schedule": [theirs / 2], "update": [theirs / 2]}))
    results.hash_ns.append(1.0)
    metrics = results.metrics()
    assert metrics["ratio_vllm_4_running_3_waiting"] == 0.3
    step = "step_us_4_running_3_waiting"
    assert (metrics[step], metrics[f"{step}_max"]) == (2.0, 30.0)
    assert (metrics[f"{step}_disturbed"], metrics[f"{step}_max_undisturbed"]) == (1, 2.0)
    assert metrics["vllm_step_us_4_running_3_waiting"] == 10.0


def test_the_prefix_caches_ratio_is_free_of_the_order_in_memory() -> None:
    results = Results()

    def side(us: float) -> Measurement:
        return Measurement({"schedule": [us]})

    results.pairs[DECODE].append([(side(1.1), side(1.0)), (side(1.0), side(1.1))])
    results.hash_ns.append(1.0)
    assert results.metrics()["prefix_cache_ratio_4_running"] == pytest.approx(1.0)


def test_the_time_of_a_step_is_that_of_its_phases() -> None:
    measured = Measurement({"schedule": [1.0, 2.0], "flatten": [10.0, 20.0], "update": [0.5, 0.25]})
    assert measured.total() == [11.5, 22.25]
    assert measured.total("schedule", "update") == [1.5, 2.25]


@pytest.mark.parametrize("hybrid", [False, True])
def test_every_timed_step_is_measured(hybrid: bool) -> None:
    case = replace(DECODE, hybrid=hybrid, context=550)
    for measured in measure_decode([case, case]):
        assert measured.phases.keys() == {"schedule", "flatten", "update"}
        assert {len(times) for times in measured.phases.values()} == {8}
        assert len(measured.disturbed) == 8
        assert measured.full_gc_us > 0


@pytest.mark.parametrize("hits", ["off", "none", "evicting", "all"])
def test_every_admission_is_measured(hits: str) -> None:
    case = AdmitCase(hits=hits, block_size=16, num_prompts=3, prompt_len=80, num_rounds=5)
    measured = measure_admit(case)
    phases = ["build", "add", "schedule", "flatten", "update", "finish"]
    assert list(measured.phases) == phases
    assert {len(times) for times in measured.phases.values()} == {5}
    assert len(measured.disturbed) == 5


def test_cells_cover_both_caches_and_layouts() -> None:
    cases = decode_cases((64, 256), (0, 10), block_size=32, context=400, num_steps=8)
    assert [case.name for case in cases if case.running == 64 and case.prefix_cache] == [
        "64_running_0_waiting",
        "64_running_10_waiting",
        "64_running_0_waiting_hybrid",
    ]
    assert len({case.name for case in cases}) == len(cases) == 12


def test_the_collectors_pauses_are_seen_in_the_block_alone() -> None:
    with collector_watched() as pauses:
        gc.collect()
    seen = len(pauses)
    gc.collect()
    assert seen == len(pauses) == 1
    assert pauses[0] > 0


def test_the_heap_is_frozen_in_the_block_alone() -> None:
    before = gc.get_freeze_count()
    with frozen_heap():
        assert gc.get_freeze_count() > before
    assert gc.get_freeze_count() == 0


def test_figures() -> None:
    figures = Figures.of([float(value) for value in range(100, -1, -1)])
    assert figures == Figures(median=50.0, p10=10.0, p90=90.0, p99=99.0, max=100.0)
    assert percentile([1.0, 2.0], 25) == 1.25
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        Figures.of([])


def test_a_table_has_numbers_to_the_right_and_texts_to_the_left() -> None:
    lines: list[str] = []
    rows = [["a", 1.25, None], ["long", 12345.6, 3]]
    print_table(["name", "us", "count"], rows, title="Title", write=lines.append)
    assert lines == [
        "\nTitle",
        "name     us  count",
        "----  -----  -----",
        "a      1.25      -",
        "long  12346      3",
    ]


def test_the_file_says_what_was_measured_and_on_what(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_json(path, {"step_us": 1.5, "steps": 2})
    document = json.loads(path.read_text())
    assert document["metrics"] == {"step_us": 1.5, "steps": 2}
    assert document["machine"].keys() == machine_facts().keys()
    assert document["machine"]["num_cores"] >= 1
    assert document["machine"]["memory_bytes"] > 1 << 20
    assert document["machine"]["cpu"]
