"""Which models are served: what `make zoo` found, as it came with this release."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).with_name("model_support.json")

BEGIN = "<!-- made by `make zoo` -->"
END = "<!-- end -->"

TP1 = {
    "equal": "yes",
    "rounding": "yes, within rounding",
    "refused": "no",
}
TP2 = {
    "split": "yes",
    "replicated": "yes, attention whole on each rank",
    "refused": "no",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSupport:
    """One model type of transformers."""

    model_type: str
    architecture: str
    tp1: str  # a key of TP1
    tp2: str  # a key of TP2
    reason: str  # why it is refused, at TP 1 or above
    note: str  # what was tested, where that isn't what checkpoints mostly are

    @property
    def name(self) -> str:
        """The type, with the note."""
        return f"{self.model_type} ({self.note})" if self.note else self.model_type


@dataclass(frozen=True, slots=True)
class ZooResults:
    """All types, by name, and the versions that they were tested with."""

    transformers: str
    torch: str
    types: Sequence[ModelSupport]  # causal language models
    multimodal: Sequence[ModelSupport]  # whose text part alone is served


def read_results() -> ZooResults:
    """What this release brings along."""
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    names = ("model_type", "architecture", "tp1", "tp2", "reason", "note")
    types, multimodal = (
        [ModelSupport(**{name: entry[name] for name in names}) for entry in content[key]]
        for key in ("types", "multimodal")
    )
    return ZooResults(content["transformers"], content["torch"], types, multimodal)


def table(results: ZooResults, *, refused: bool) -> Iterator[str]:
    """Lines for the terminal: the types that are served, or those that aren't and why."""
    entries = (*results.types, *results.multimodal)
    if refused:
        for entry in entries:
            if entry.tp1 == "refused":
                yield f"{entry.model_type:26} {entry.reason}"
        return
    yield f"{'model_type':26} {'class':38} {'TP 1':22} TP 2 and more"
    for entry in entries:
        if entry.tp1 != "refused":
            what = TP2[entry.tp2] + (f": {entry.reason}" if entry.tp2 == "refused" else "")
            what += f" ({entry.note})" if entry.note else ""
            yield f"{entry.model_type:26} {entry.architecture:38} {TP1[entry.tp1]:22} {what}"


def readme_rows(results: ZooResults) -> str:
    """The table of the README that tells which models are served."""

    def listed(tp1: Sequence[str], tp2: str) -> str:
        return _names([e for e in results.types if e.tp1 in tp1 and e.tp2 == tp2])

    equal = ("equal", "rounding")
    multimodal = [e for e in results.multimodal if e.tp1 in equal and e.tp2 == "split"]
    refused = sum(entry.tp1 == "refused" for entry in results.types)
    whole = ", ".join(e.model_type for e in results.types if e.tp1 == "rounding") or "none"
    rows = (
        (f"transformers {results.transformers}, torch {results.torch}, CPU", "model types"),
        ("---", "---"),
        ("equal at TP 1, and at TP 2 with weights and KV heads split", listed(equal, "split")),
        ("the same, but every rank holds all of attention", listed(equal, "replicated")),
        ("equal at TP 1, refused above", listed(equal, "refused")),
        ("of these, equal only within transformers' own rounding", whole),
        ("refused, with the reason", f"{refused}: `lockstep models --refused`"),
        ("text parts of types with images, equal and split", _names(multimodal)),
    )
    return "\n".join(f"| {what} | {types} |" for what, types in rows)


def _names(entries: Sequence[ModelSupport]) -> str:
    return f"{len(entries)}: {', '.join(e.name for e in entries)}" if entries else "none"


def write_readme(readme: Path) -> None:
    """Puts the table between its marks."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{readme} has no lines {BEGIN!r} and {END!r}")
    table = readme_rows(read_results())
    readme.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_readme(Path(sys.argv[1]))
