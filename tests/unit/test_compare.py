"""What a comparison makes of its runs, and how it talks to the engines' processes."""

import ast
import json
import sys
from dataclasses import replace
from pathlib import Path

import click
import psutil
import pytest

from benchmarks.compare import process_tree
from benchmarks.compare.options import by_prefix_caching, read_ours
from benchmarks.compare.pairs import Pairs, Side, measure_pairs
from benchmarks.compare.results import Compared, details_of, markdown, metrics_of, warnings
from benchmarks.compare.subject import Subject, SubjectSpec
from benchmarks.compare.subjects import PEERS, SUBJECTS, Places, Setup, serve_options, specify
from benchmarks.workloads.shapes import make_uniform, make_workload

pytestmark = pytest.mark.unit

WORKLOAD = make_uniform(model="m", vocab_size=5000, num_requests=2, prompt_len=9, output_len=4)
SINGLE = make_uniform(model="m", vocab_size=5000, num_requests=1, prompt_len=9, output_len=5)
# Answers as an engine would; its prompts go to a file, one line a run.
ENGINE = """
import json, sys
sys.path.insert(0, {peers!r})
from runner import answer, take_stdout
answers = take_stdout()
print("what a library prints")

def run(requests):
    with open({seen!r}, "a") as file:
        file.write(json.dumps([[each["prompt"], each["output_len"]] for each in requests]) + "\\n")
    {body}
    return [each["output_len"] for each in requests]

answer(answers, "engine 1.0", run)
"""


def spec(tmp_path: Path, name: str, *, body: str = "", pauses: bool = True) -> SubjectSpec:
    script = ENGINE.format(peers=str(PEERS), seen=str(tmp_path / name), body=body)
    return SubjectSpec(
        name=name,
        command=(sys.executable, "-c", script),
        variables={},
        folder=tmp_path,
        pauses=pauses,
    )


def seen(tmp_path: Path, name: str) -> list[list[list[object]]]:
    """Runs after the probe: prompts and lengths."""
    return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()][1:]


def test_two_engines_get_the_same_tokens_in_turn_and_new_ones_in_each_pair(
    tmp_path: Path,
) -> None:
    ran = []
    with (
        Subject(spec(tmp_path, "one"), timeout_s=60) as one,
        Subject(spec(tmp_path, "two", pauses=False), timeout_s=60) as two,
    ):
        one.start()
        two.start()
        assert one.engine == two.engine == "engine 1.0"
        assert one.startup_s > 0
        pairs = measure_pairs(one, two, WORKLOAD, num_pairs=2, on_run=lambda: ran.append(1))
    first, second = seen(tmp_path, "one"), seen(tmp_path, "two")
    assert first == second
    prompts = {json.dumps(prompt) for run in first for prompt, _ in run}
    assert len(prompts) == 3 * 2  # a run that isn't counted, and two that are
    assert len(ran) == 6
    for side in (pairs.reference, pairs.peer):
        assert len(side.walls_s) == len(side.memory_bytes) == len(side.idle_shares) == 2
        assert min(side.memory_bytes) > 1 << 20
        assert not side.ttfts_s


def test_a_single_request_is_run_for_its_first_token_too(tmp_path: Path) -> None:
    with (
        Subject(spec(tmp_path, "one"), timeout_s=60) as one,
        Subject(spec(tmp_path, "two"), timeout_s=60) as two,
    ):
        one.start()
        two.start()
        pairs = measure_pairs(one, two, SINGLE, num_pairs=1)
    assert [run[0][1] for run in seen(tmp_path, "one")] == [1, 5, 1, 5]
    assert len(pairs.reference.ttfts_s) == len(pairs.peer.ttfts_s) == 1
    assert len(pairs.tpot_ratios) == len(pairs.ttft_ratios) == 1


def test_an_engine_that_pauses_stands_still_between_runs(tmp_path: Path) -> None:
    spins = "threading.Thread(target=lambda: all(iter(lambda: True, False)), daemon=True).start()"
    body = f"import threading; {spins}"
    with Subject(spec(tmp_path, "busy", body=body), timeout_s=60) as busy:
        busy.start()
        (process,) = [
            each for each in psutil.Process().children() if "engine 1.0" in str(each.cmdline())
        ]
        busy.run(WORKLOAD)
        # The kernel stops a thread that runs a moment after the call.
        while process.status() != psutil.STATUS_STOPPED:
            pass
        assert process_tree.memory_bytes(process.pid) > 1 << 20
    assert not process.is_running()


def test_a_request_with_other_than_its_tokens_ends_the_comparison(tmp_path: Path) -> None:
    body = "if len(requests) > 1: return [4, 3]"
    with Subject(spec(tmp_path, "short", body=body), timeout_s=60) as short:
        short.start()
        with pytest.raises(click.ClickException) as caught:
            short.run(WORKLOAD)
    assert caught.value.message == (
        "short: 2x9+4: output tokens of the requests are [4, 3], but must be [4, 4]"
    )


def test_an_engine_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    body = "raise SystemExit('no memory')"
    with (
        Subject(spec(tmp_path, "gone", body=body), timeout_s=60) as gone,
        pytest.raises(click.ClickException) as caught,
    ):
        gone.start()
    assert caught.value.message == "gone: ended with code 1\nwhat a library prints\nno memory"


def test_an_engine_that_is_silent_is_killed(tmp_path: Path) -> None:
    quiet = SubjectSpec(
        name="quiet",
        command=(sys.executable, "-c", "input()"),
        variables={},
        folder=tmp_path,
        pauses=True,
    )
    with (
        Subject(quiet, timeout_s=0.05) as subject,
        pytest.raises(click.ClickException, match=r"quiet: silent for 0\.05 s"),
    ):
        subject.start()


def compared(*, idle_share: float = 0.0) -> Compared:
    ours = Side([1.0, 2.0, 4.0], [0.1, 0.2, 0.3], [10**9] * 3, [idle_share] * 3)
    theirs = Side([2.0, 3.0, 20.0], [0.2, 0.2, 0.2], [2 * 10**9] * 3, [0.0] * 3)
    return Compared(
        reference="ours",
        peer="vllm",
        engines={"ours": "Lockstep 1", "vllm": "vLLM 2"},
        startups_s={"ours": 5.0, "vllm": 60.0},
        pairs=Pairs(workload=SINGLE, reference=ours, peer=theirs),
        floor_s=0.5,
    )


def test_ratios_are_of_pairs_not_of_medians() -> None:
    metrics = metrics_of([compared()])
    name = "vllm_1x9+5"
    assert metrics[f"ratio_{name}"] == 2.0
    assert (metrics[f"ratio_min_{name}"], metrics[f"ratio_max_{name}"]) == (1.5, 5.0)
    assert metrics[f"ttft_ratio_{name}"] == 1.0
    # Later tokens: 0.45 of 0.2 behind, 0.7, 4.95 over (0.2, 0.45, 0.95).
    assert metrics[f"tpot_ratio_{name}"] == pytest.approx(0.45 / 0.2)
    assert metrics["wall_s_ours_1x9+5_beside_vllm"] == 2.0
    assert metrics["output_tokens_per_s_vllm_1x9+5"] == 5 / 3
    assert metrics["memory_gb_vllm_1x9+5"] == 2.0
    assert metrics["start_s_vllm"] == 60.0


def test_the_table_has_both_engines_and_the_share_of_the_floor() -> None:
    _, _, ours, theirs = markdown([compared()]).splitlines()
    assert ours.startswith("| 1x9+5 | ours: Lockstep 1 | 2.00 | 2.50 | 7.00 | 1.00 | - | 200 |")
    assert ours.endswith("| 25% |")
    assert "| 2.00 | 1.50-5.00 | 200 |" in theirs


def test_what_makes_figures_doubtful_is_told() -> None:
    lines = warnings([compared(idle_share=0.2)])
    assert lines[0] == (
        "ours took 20% of a core while it had nothing to do, beside 1x9+5: the other's figures are "
        "too slow"
    )
    assert any("vllm, 1x9+5: runs took 2.00 to 20.0 s" in line for line in lines)
    (details,) = details_of([compared(idle_share=0.2)])["comparisons"]  # type: ignore[misc]
    assert details["busy_while_idle"] == ["reference"]


def test_engines_are_started_once_with_and_once_without_a_prefix_cache() -> None:
    made = [make_workload(kind, model="m", vocab_size=5000) for kind in "DABC"]
    groups = by_prefix_caching(made)
    assert [[each.name for each in group] for group in groups] == [["A", "B", "C"], ["D"]]


def test_options_of_ours_reach_library_and_server_alike() -> None:
    ours = read_ours(["max_num_batched_tokens=2048", "deterministic=true", "attention=native"])
    assert ours == {
        "max_num_batched_tokens": 2048,
        "deterministic": True,
        "attention": "native",
    }
    assert serve_options(ours | {"prefix_cache": False}) == [
        "--max-num-batched-tokens=2048",
        "--deterministic",
        "--attention=native",
        "--no-prefix-cache",
    ]
    with pytest.raises(click.UsageError, match="--ours tp must be NAME=VALUE"):
        read_ours(["tp"])


def test_every_engine_says_what_it_needs_and_peers_see_nothing_of_ours(tmp_path: Path) -> None:
    there = {
        "vllm_python": Path(sys.executable),
        "openvino_python": Path(sys.executable),
        "openvino_model": tmp_path,
        "llama_server": Path(sys.executable),
        "gguf": tmp_path / "model.gguf",
    }
    setup = Setup(
        model=tmp_path,
        prefix_caching=True,
        max_model_len=64,
        threads=2,
        places=Places(**there),  # type: ignore[arg-type]
    )
    for name in SUBJECTS:
        specified = specify(name, setup)
        assert specified.pauses is not name.startswith("ours")
        assert specified.pauses is (specified.folder is None) or "over_network" in str(specified)
    bare = Setup(model=tmp_path, prefix_caching=True, max_model_len=64, threads=2)
    for name, option in (("vllm", "--vllm-python"), ("llama.cpp", "--llama-server")):
        with pytest.raises(click.UsageError, match=f"{name} needs {option}"):
            specify(name, bare)


def test_ranks_of_vllm_have_cores_of_their_own(tmp_path: Path) -> None:
    setup = Setup(
        model=tmp_path,
        prefix_caching=False,
        max_model_len=64,
        threads=4,
        places=Places(vllm_python=Path(sys.executable)),
    )
    for threads, wanted in ((4, ["0-3", "0-1|2-3"]), (2, ["0-1", "0|1"])):
        specs = [specify(name, replace(setup, threads=threads)) for name in ("vllm", "vllm-tp2")]
        assert [each.variables["VLLM_CPU_OMP_THREADS_BIND"] for each in specs] == wanted


@pytest.mark.parametrize("path", sorted(PEERS.glob("*_offline.py")), ids=lambda path: path.stem)
def test_the_peers_scripts_import_nothing_of_ours(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            imported.add(node.module.partition(".")[0])
    assert "runner" in imported
    assert not imported & {"benchmarks", "runtime", "workers", "protos", "tests"}
