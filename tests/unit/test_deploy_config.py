"""The example of a configuration file has every option, with the default that it has."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from runtime.cli import cli
from runtime.commands.common import ByteSize
from tests.deploy_files import CONFIGS, EXAMPLE_CONFIG, read_command

pytestmark = pytest.mark.unit

FIELDS = {field.name: field for config in CONFIGS["serve"] for field in dataclasses.fields(config)}


def keys_after(mark: str) -> dict[str, Any]:
    lines = re.findall(rf"^{re.escape(mark)}(\w+ = .*)$", EXAMPLE_CONFIG.read_text(), re.MULTILINE)
    return tomllib.loads("\n".join(lines))


def test_it_changes_nothing_as_it_is() -> None:
    assert read_command(["serve", "--config", str(EXAMPLE_CONFIG)]) == {
        config: config() for config in CONFIGS["serve"]
    }


def test_it_has_every_option_once() -> None:
    defaults, examples = keys_after("#"), keys_after("#!")
    assert not defaults.keys() & examples.keys()
    missing = FIELDS.keys() - defaults.keys() - examples.keys()
    assert not missing, f"add to {EXAMPLE_CONFIG.name}: {sorted(missing)}"
    assert not (defaults.keys() | examples.keys()) - FIELDS.keys()


def test_defaults_are_those_of_the_options() -> None:
    for name, value in keys_after("#").items():
        field = FIELDS[name]
        if field.metadata["unit"] == "bytes":
            value = ByteSize().convert(value, None, None)
        assert (name, value) == (name, field.default)


def test_what_is_an_example_has_no_default() -> None:
    for name in keys_after("#!"):
        assert FIELDS[name].default in (None, ()), name


def test_every_line_may_be_taken(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(re.sub(r"^#!?(?=\w+ = )", "", EXAMPLE_CONFIG.read_text(), flags=re.MULTILINE))
    with cli.commands["serve"].make_context("serve", ["--config", str(path)]) as context:
        given = {name: context.get_parameter_source(name) for name in FIELDS}
    assert {source.name for source in given.values() if source} == {"DEFAULT_MAP"}
