"""What a rerun makes of its files, and which files are refused."""

import json
import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from runtime.batch.ledger import Ledger
from runtime.batch.results import ResultFile
from runtime.errors import ConfigError, InvalidRequestError
from tests.batches import line, number_of, read, run, write

pytestmark = pytest.mark.unit


def test_an_output_cut_at_any_byte_is_completed(tmp_path: Path) -> None:
    ids = ["a", "b", "c"]
    write(tmp_path / "input.jsonl", [line(each) for each in ids])
    run(tmp_path, max_concurrency=1)
    whole = (tmp_path / "output.jsonl").read_bytes()
    for end in range(0, len(whole), 7):
        (tmp_path / "output.jsonl").write_bytes(whole[:end])
        run(tmp_path)
        assert sorted(each["custom_id"] for each in read(tmp_path / "output.jsonl")) == ids


def test_another_inputs_output_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "input.jsonl", [line("a")])
    run(tmp_path)
    write(tmp_path / "input.jsonl", [line("b")])
    with pytest.raises(ConfigError, match="output belongs to another input: line 1"):
        run(tmp_path)


OTHER = line("b", body={"prompt": "another"})


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line("a"), OTHER, "{", line("d"), line("e")], "line 2 isn't the one"),
        ([line("a"), line("b"), "[", line("d"), line("e")], "line 3 isn't the one"),
        ([line("0"), line("a"), line("b"), "{", line("d")], "line 1 isn't the one"),
        ([line("a"), line("b"), "{"], "a result of line 4, which isn't in this one"),
        ([line("a"), " ", "{", line("d"), line("e")], "a result of line 2, which isn't in this"),
        ([], "a result of line 1, which isn't in this one"),
    ],
)
def test_results_of_lines_as_they_were_before_are_refused(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    write(tmp_path / "input.jsonl", [line("a"), line("b"), "{", line("d")])
    run(tmp_path)
    before = (tmp_path / "output.jsonl").read_bytes()
    write(tmp_path / "input.jsonl", lines)
    with pytest.raises(ConfigError, match=f"output belongs to another input: .*{message}"):
        run(tmp_path)
    assert (tmp_path / "output.jsonl").read_bytes() == before


def test_an_input_may_grow(tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_text(line("a"))
    run(tmp_path)
    write(tmp_path / "input.jsonl", [line("a"), line("b")])
    tally = run(tmp_path)
    assert (tally.num_before, tally.num_answered) == (1, 1)


def test_results_without_digests_are_known(tmp_path: Path) -> None:
    write(tmp_path / "input.jsonl", [line("a"), line("b")])
    write(tmp_path / "output.jsonl", [json.dumps({"id": "batch_req_1", "custom_id": "a"})])
    tally = run(tmp_path)
    assert (tally.num_before, tally.num_answered) == (1, 1)
    write(tmp_path / "input.jsonl", [line("c"), line("b")])
    with pytest.raises(ConfigError, match="line 1 has custom_id='c', and its result another one"):
        run(tmp_path)


@pytest.mark.parametrize("name", ["input", "output", "errors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_taken(tmp_path: Path, name: str, kind: str) -> None:
    write(tmp_path / "input.jsonl", [line("a")])
    path = tmp_path / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=f"{name}='.*' must be a regular file"):
        run(tmp_path)


def test_lines_of_a_result_file_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "output.jsonl"
    path.write_text('{"id": "batch_req_1", "custom_id": "' + "a" * 1000)
    with (
        Ledger() as ledger,
        ResultFile(path, option="output", max_bytes=1000) as output,
    ):
        with pytest.raises(ConfigError, match="line 1 isn't a result of a batch"):
            output.recover(ledger)
        with pytest.raises(InvalidRequestError, match="1011 bytes is longer than 1000"):
            output.write({"text": "a" * 998})


def test_a_file_without_line_ends_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "output.jsonl"
    path.touch()
    os.truncate(path, 64 << 20)
    with Ledger() as ledger, ResultFile(path, option="output", max_bytes=1000) as output:
        tracemalloc.start()
        try:
            with pytest.raises(ConfigError, match="line 1 isn't a result of a batch"):
                output.recover(ledger)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 1 << 20
    assert path.stat().st_size == 64 << 20


def test_a_file_without_a_line_end_is_cut_only_if_it_is_ours(tmp_path: Path) -> None:
    write(tmp_path / "input.jsonl", [line("a")])
    (tmp_path / "output.jsonl").write_text("notes")
    with pytest.raises(ConfigError, match="line 1 isn't a result of a batch"):
        run(tmp_path)
    assert (tmp_path / "output.jsonl").read_text() == "notes"


FULL_DISK = """
import resource, sys
from pathlib import Path
from runtime.errors import ConfigError
from tests.batches import run

resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    run(Path(sys.argv[1]))
except ConfigError as error:
    print(error)
"""


def test_a_full_disk_is_told_and_a_rerun_does_the_rest(tmp_path: Path) -> None:
    write(tmp_path / "input.jsonl", [line(str(number)) for number in range(100)])
    output = tmp_path / "output.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == (
        f"output={str(output)!r} can't be written: File too large; once it can, the same command "
        "does the rest\n"
    )
    assert done.stderr == ""
    num_before = output.read_bytes().count(b"\n")
    assert 0 < num_before < 100
    tally = run(tmp_path)
    assert (tally.num_before, tally.num_answered) == (num_before, 100 - num_before)
    assert sorted(map(number_of, read(output))) == list(range(1, 101))


FULL_TEMPORARY_FILES = """
import resource
from runtime.batch.ledger import Ledger
from runtime.errors import ConfigError

resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
with Ledger() as ledger:
    try:
        for number in range(1, 200_000):
            ledger.first_line_of(str(number), number)
    except ConfigError as error:
        print(error)
"""


def test_no_room_for_temporary_files_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_TEMPORARY_FILES],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("the list of finished lines, a temporary file, can't be written")
    assert done.stderr == ""


def test_nothing_is_written_after_a_torn_line(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "output.jsonl"
    with ResultFile(path, option="output") as output:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            with pytest.raises(ConfigError, match="can't be written"):
                output.write({"text": "a" * 200})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        with pytest.raises(ConfigError, match="can't be written"):
            output.write({})
    assert path.stat().st_size == 100


@pytest.mark.parametrize("content", ["text\n", "{}\n", '{"id": "x", "custom_id": "a"}\n'])
def test_a_file_of_something_else_is_refused_unchanged(tmp_path: Path, content: str) -> None:
    write(tmp_path / "input.jsonl", [line("a")])
    (tmp_path / "output.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="line 1 isn't a result of a batch"):
        run(tmp_path)
    assert (tmp_path / "output.jsonl").read_text() == content


def test_two_runs_on_one_output_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "input.jsonl", [line("a")])
    with (
        ResultFile(tmp_path / "output.jsonl", option="output"),
        pytest.raises(ConfigError, match="is written by another run"),
    ):
        run(tmp_path)


def test_a_missing_input_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        run(tmp_path)
