"""Dataclass fields that the command line and TOML files set."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *, envvar: str | None = None, unit: str | None = None) -> Any:
    """A field with the sentence that `--help` shows for it.

    `unit="bytes"` accepts sizes such as 2GiB.
    """
    return field(default=default, metadata={"help": help, "envvar": envvar, "unit": unit})
