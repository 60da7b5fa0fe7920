"""What this release says about the models it serves."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from runtime.cli import cli
from runtime.model_gate import TESTED_TYPES
from runtime.model_support import (
    BEGIN,
    END,
    TP1,
    TP2,
    ModelSupport,
    ZooResults,
    read_results,
    readme_rows,
    write_readme,
)

pytestmark = pytest.mark.unit

RESULTS = read_results()
ALL = (*RESULTS.types, *RESULTS.multimodal)
README = Path(__file__).parents[2] / "README.md"
PATHS = re.compile(r"(^|[\s'\"(])/(?!/)\w+")


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.model_type)
def test_every_entry_makes_sense(entry: ModelSupport) -> None:
    assert entry.tp1 in TP1
    assert entry.tp2 in TP2
    assert entry.architecture
    if entry.tp1 == "refused":
        assert entry.tp2 == "refused"
    # Who is refused, at TP 1 or at TP 2, gets a sentence; who is served needs none.
    assert bool(entry.reason) == (entry.tp2 == "refused")
    assert "\n" not in entry.reason
    assert not PATHS.search(entry.reason), "tells of the machine that made the file"


def test_types_are_named_once_and_in_order() -> None:
    for entries in (RESULTS.types, RESULTS.multimodal):
        names = [entry.model_type for entry in entries]
        assert names == sorted(set(names))
    assert len({entry.model_type for entry in ALL}) == len(ALL)
    assert re.fullmatch(r"[\d.]+", RESULTS.transformers)
    assert re.fullmatch(r"[\d.]+", RESULTS.torch)


def test_types_that_pass_the_gate_untested_are_served_on_two_ranks() -> None:
    served = {entry.model_type for entry in RESULTS.types if entry.tp2 == "split"}
    assert served >= TESTED_TYPES


def test_served_types_are_shown() -> None:
    result = CliRunner().invoke(cli, ["models"])
    assert result.exit_code == 0, result.output
    first, head, *lines = result.output.splitlines()
    assert RESULTS.transformers in first
    assert RESULTS.torch in first
    assert head.split()[:2] == ["model_type", "class"]
    served = [entry for entry in ALL if entry.tp1 != "refused"]
    assert [line.split()[:2] for line in lines] == [[e.model_type, e.architecture] for e in served]
    by_type = {line.split()[0]: line for line in lines}
    assert by_type["olmoe"].endswith(" yes                    yes")
    assert by_type["ctrl"].endswith("yes, attention whole on each rank")
    assert "no: BitNetForCausalLM: its parts don't fit" in by_type["bitnet"]


def test_refused_types_are_shown_with_their_reasons() -> None:
    result = CliRunner().invoke(cli, ["models", "--refused"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()[1:]
    refused = [entry for entry in ALL if entry.tp1 == "refused"]
    assert [tuple(line.split(maxsplit=1)) for line in lines] == [
        (entry.model_type, entry.reason) for entry in refused
    ]
    by_type = dict(line.split(maxsplit=1) for line in lines)
    assert "recurrent layers" in by_type["mamba"]
    assert "ALiBi" in by_type["bloom"]


def make_entry(model_type: str, tp1: str, tp2: str, note: str = "") -> ModelSupport:
    return ModelSupport(
        model_type=model_type,
        architecture="Any",
        tp1=tp1,
        tp2=tp2,
        reason="for a reason",
        note=note,
    )


def test_a_note_stands_beside_the_type():
    assert make_entry("bert", "equal", "split", "as a decoder").name == "bert (as a decoder)"
    noted = {each.model_type: each.note for each in read_results().types if each.note}
    assert noted["bert"] == "as a decoder"
    assert noted["lfm2"] == "attention layers only"
    assert "llama" not in noted


def table_of(types: list[ModelSupport], multimodal: list[ModelSupport]) -> list[list[str]]:
    """The cells of the README's table, without what is above them."""
    results = ZooResults("1.2", "3.4", types, multimodal)
    head, _, *rows = (row.strip("| ").split(" | ") for row in readme_rows(results).split("\n"))
    assert head[0] == "transformers 1.2, torch 3.4, CPU"
    return rows


def test_rows_count_every_type() -> None:
    rows = table_of(
        [
            make_entry("a", "equal", "split"),
            make_entry("b", "rounding", "split"),
            make_entry("c", "equal", "replicated"),
            make_entry("d", "equal", "refused"),
            make_entry("e", "refused", "refused"),
            make_entry("f", "refused", "refused"),
        ],
        [make_entry("g", "equal", "split"), make_entry("h", "refused", "refused")],
    )
    assert [types for _, types in rows[:4]] == ["2: a, b", "1: c", "1: d", "b"]
    assert rows[4][1].startswith("2: ")
    assert rows[5][1] == "1: g"


def test_rows_without_types_say_so() -> None:
    rows = table_of([make_entry("a", "equal", "split")], [])
    assert [types for _, types in rows[:4]] == ["1: a", "none", "none", "none"]
    assert rows[4][1].startswith("0: ")
    assert rows[5][1] == "none"


def test_the_readme_has_the_rows() -> None:
    """Fails where the file was made again and the README wasn't: `make zoo` does both."""
    assert readme_rows(RESULTS) in README.read_text(encoding="utf-8")


def test_rows_are_written_between_their_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n\n{BEGIN}\n| old |\n{END}\n\nafter\n")
    for _ in range(2):
        write_readme(readme)
        assert readme.read_text() == (
            f"before\n\n{BEGIN}\n{readme_rows(RESULTS)}\n{END}\n\nafter\n"
        )


@pytest.mark.parametrize("content", ["no marks", f"{BEGIN}\n| old |\n", f"| old |\n{END}\n"])
def test_a_readme_without_marks_is_left_alone(tmp_path: Path, content: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(content)
    with pytest.raises(SystemExit, match="has no lines"):
        write_readme(readme)
    assert readme.read_text() == content
