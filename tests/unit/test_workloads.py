"""Workload files: what is drawn, what is read, what is refused."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.__main__ import benchmarks
from benchmarks.workloads.shapes import make_uniform, make_workload
from benchmarks.workloads.workload import load_workload, save_workload

pytestmark = pytest.mark.unit

# Of token ids and lengths, sha256: what was measured before is measured again.
DIGESTS = {
    ("A", 32000): "6fb37b71674b96a5",
    ("B", 32000): "93d9efdffbe15f22",
    ("C", 32000): "e96aa56ef6fd2758",
    ("D", 32000): "e33a458c7628be4e",
    ("A", 262144): "4c2af4af0e6077db",
    ("B", 262144): "2e25adb2610ceb18",
    ("C", 262144): "032c108cac69eeda",
    ("D", 262144): "f2cf6d607bd47180",
}


@pytest.mark.parametrize(("kind", "vocab_size"), DIGESTS)
def test_the_same_seed_gives_the_same_tokens_for_ever(kind: str, vocab_size: int) -> None:
    made = make_workload(kind, model="m", vocab_size=vocab_size)
    assert made.digest()[:16] == DIGESTS[kind, vocab_size]
    assert made.prefix_caching is (kind == "D")
    other = make_workload(kind, model="m", vocab_size=vocab_size, seed=1)
    assert other.digest() != made.digest()


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    made = make_workload("B", model="m", vocab_size=32000)
    path = tmp_path / "b.json"
    save_workload(made, path)
    assert load_workload(path) == made


def test_the_command_writes_what_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    shape = ["--requests=3", "--prompt=20", "--output=5", "--shared=8"]
    command = ["workload", "--kind=uniform", "--vocab=5000", "--model=m", f"--out={path}", *shape]
    result = CliRunner().invoke(benchmarks, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    made = load_workload(path)
    assert [len(each.prompt) for each in made.requests] == [20] * 3
    assert len({each.prompt[:8] for each in made.requests}) == 1
    assert len({each.prompt[8:] for each in made.requests}) == 3
    assert made.num_output_tokens == 15
    assert made.prefix_caching
    refused = CliRunner().invoke(benchmarks, [*command, "--shared=20"])
    assert "--shared 20 must be less than --prompt 20" in refused.output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": None}, "seed must be of type int, not NoneType"),
        ({"prefix_caching": 1}, "prefix_caching must be of type bool, not int"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"requests": []}, "requests is empty"),
        ({"requests": [1]}, "requests[0] must be an object, not int"),
        (
            {"requests": [{"prompt": [1, 9], "output_len": 1}, {"prompt": [1, 10]}]},
            "requests[1].prompt[1]=10 must be in [0, vocab_size=10)",
        ),
        (
            {"requests": [{"prompt": [True], "output_len": 1}]},
            "requests[0].prompt[0]=True must be in [0, vocab_size=10)",
        ),
        (
            {"requests": [{"prompt": [], "output_len": 1}]},
            "requests[0].prompt must be a list of at least one token id",
        ),
        (
            {"requests": [{"prompt": [1]}]},
            "requests[0].output_len=None must be a number of at least 1",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    small = make_uniform(model="m", vocab_size=10, num_requests=1, prompt_len=2, output_len=1)
    path = tmp_path / "w.json"
    path.write_text(json.dumps(small.to_json() | change))
    with pytest.raises(click.ClickException) as caught:
        load_workload(path)
    assert caught.value.message == f"{path} is no workload: {said}"


def test_a_missing_field_and_a_file_that_is_no_json_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text("{}")
    with pytest.raises(click.ClickException, match="name is missing"):
        load_workload(path)
    path.write_text("{")
    with pytest.raises(click.ClickException, match="can't be read as JSON"):
        load_workload(path)


@pytest.mark.parametrize(("vocab_size", "low", "high"), [(32000, 1000, 31000), (512, 0, 512)])
def test_shifted_ids_differ_everywhere_and_stay_in_range(
    vocab_size: int, low: int, high: int
) -> None:
    made = make_uniform(
        model="m",
        vocab_size=vocab_size,
        num_requests=2,
        prompt_len=200,
        output_len=4,
        shared_len=100,
    )
    shifted = made.shifted(7)
    for before, after in zip(made.requests, shifted.requests, strict=True):
        assert all(one != other for one, other in zip(before.prompt, after.prompt, strict=True))
        assert low <= min(after.prompt)
        assert max(after.prompt) < high
        assert after.output_len == before.output_len
    first, second = shifted.requests
    assert first.prompt[:100] == second.prompt[:100]
    assert [each.output_len for each in shifted.first_tokens().requests] == [1, 1]
