"""What is in deploy/, and its command lines as the command line reads them."""

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from runtime.cli import cli
from runtime.commands.common import pick
from runtime.config import EngineConfig
from runtime.frontend_config import FrontendConfig, ServeConfig
from runtime.frontend_processes import FRONTEND_STOP_S
from runtime.interrupts import END_WITHIN_S

REPOSITORY = Path(__file__).parents[1]
DEPLOY = REPOSITORY / "deploy"
EXAMPLE_CONFIG = DEPLOY / "config.example.toml"
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
CONFIGS = {"serve": (EngineConfig, FrontendConfig, ServeConfig), "frontend": (FrontendConfig,)}
# A server that is told to end takes so long at most; after that it may be killed.
LONGEST_END_S = FrontendConfig().drain_timeout_s + FRONTEND_STOP_S + END_WITHIN_S
ENDS = re.compile(r"[|&;<>]+|\d?>.*")


def read_command(arguments: Sequence[str]) -> dict[type, Any]:
    """The configurations that `lockstep ARGUMENTS` would run with, by their classes.

    Configuration files, which are on another machine, are taken to be our example. Raises what the
    command line would.
    """
    name, *rest = arguments
    options = ["--config" if each.startswith("--config=") else each for each in rest]
    for index, option in enumerate(options[:-1]):
        if option == "--config":
            options[index + 1] = str(EXAMPLE_CONFIG)
    with cli.commands[name].make_context(name, options) as context:
        return {config: pick(config, context.params) for config in CONFIGS.get(name, ())}


def find_commands(text: str) -> list[list[str]]:
    """Arguments of each `lockstep` in a shell's lines, be they commented out or quoted."""
    lines = re.sub(r"\\\n\s*#?", " ", text).splitlines()
    return [found for line in lines for found in _in_line(line.strip().lstrip("#"))]


def code_blocks(markdown: str) -> str:
    return "\n".join(re.findall(r"```bash\n(.*?)```", markdown, re.DOTALL))


def load_yaml(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def _in_line(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose with an apostrophe
        return
    for index, word in enumerate(words):
        if word.startswith("lockstep "):
            yield from _in_line(word)
        elif Path(word).name == "lockstep" and words[index + 1 : index + 2]:
            rest = words[index + 1 :]
            if rest[0] in cli.commands:
                end = next((at for at, each in enumerate(rest) if ENDS.fullmatch(each)), None)
                yield rest[:end]
