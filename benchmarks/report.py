"""What all benchmarks share: figures of measurements, tables, the JSON file, the machine."""

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil

json_option = click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help='Write {"metrics": {name: number}, "machine": {...}} to this file.',
)
smoke_option = click.option(
    "--smoke", is_flag=True, help="Tiny and quick, to see that it runs; its figures mean nothing."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Many measurements of one quantity."""

    median: float
    p10: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figures":
        """Raises ValueError: there are none."""
        if not values:
            raise ValueError("no values to sum up")
        ordered = sorted(values)
        return cls(
            median=median(ordered),
            p10=percentile(ordered, 10),
            p90=percentile(ordered, 90),
            p99=percentile(ordered, 99),
            max=ordered[-1],
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, by linear interpolation between the two nearest."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def print_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    title: str = "",
    write: Callable[[str], object] = click.echo,
) -> None:
    """Columns as wide as their widest cell; numbers to the right, anything else to the left."""
    cells = [[shown(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    numeric = [
        bool(rows) and all(is_number(row[index]) for row in rows) for index in range(len(headers))
    ]

    def line(texts: Sequence[str]) -> str:
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(texts, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    if title:
        write(f"\n{title}")
    write(line(headers))
    write("  ".join("-" * width for width in widths))
    for row in cells:
        write(line(row))


def is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def shown(value: object) -> str:
    """Four significant digits of a float, or all before its point; a dash for None."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    for limit, form in ((0.1, ".4f"), (1, ".3f"), (10, ".2f"), (100, ".1f")):
        if abs(value) < limit:
            return format(value, form)
    return format(value, ".0f")


def markdown_row(cells: Sequence[object]) -> str:
    """A line of a table in Markdown."""
    return "| " + " | ".join(shown(each).replace("|", "\\|") for each in cells) + " |"


def write_json(
    path: Path, metrics: Mapping[str, float], details: Mapping[str, object] | None = None
) -> None:
    """Writes the metrics with the facts of the machine they were measured on.

    `details` go beside them.
    """
    document = {"metrics": dict(metrics), "machine": machine_facts(), **(details or {})}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge figures by; `torch` is None where it isn't installed."""
    return {
        "cpu": cpu_model(),
        "num_cores": len(psutil.Process().cpu_affinity()),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": installed("torch"),
        "load_average": list(os.getloadavg()),
    }


def machine_line() -> str:
    facts = machine_facts()
    load = facts["load_average"][0]
    return (
        f"{facts['cpu']}, {facts['num_cores']} cores, Python {facts['python']}, "
        f"load average {load:.1f}"
    )


def cpu_model() -> str:
    """From Linux's list of processors; elsewhere what Python knows."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
