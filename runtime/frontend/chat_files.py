"""What a model's folder says about chats: its templates and its special tokens."""

import json
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError

DEFAULT = "default"
# Taken instead of the default one where a chat has tools.
TOOL_USE = "tool_use"


def read_templates(folder: Path) -> dict[str, str]:
    """The sources of the model's chat templates by name; empty where it has none.

    Files of their own come before entries of tokenizer_config.json, as in transformers; last is
    chat_template.json, where models with a processor kept theirs.
    Raises ConfigError: a file can't be read.
    """
    templates = _read_separate(folder)
    if not templates:
        templates = _read_entry(folder / "tokenizer_config.json")
    if not templates:
        templates = _read_entry(folder / "chat_template.json")
    return templates


def read_template(path: Path) -> str:
    """Raises ConfigError: there is no such file, or it is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat template {path}: {error}") from error


def read_special_tokens(folder: Path) -> dict[str, str]:
    """Texts of the special tokens that templates may name, such as bos_token.

    Raises ConfigError: a file can't be read.
    """
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the latter wins
        entries = _read_json(folder / name)
        extra = entries.get("extra_special_tokens")
        if isinstance(extra, dict):
            entries = {**entries, **extra}
        for key, value in entries.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    return tokens


def _read_separate(folder: Path) -> dict[str, str]:
    paths = {
        path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    default = folder / "chat_template.jinja"
    if default.is_file():
        paths[DEFAULT] = default
    return {name: read_template(path) for name, path in paths.items()}


def _read_entry(path: Path) -> dict[str, str]:
    entry = _read_json(path).get("chat_template")
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {DEFAULT: entry}
    try:
        templates = {each["name"]: each["template"] for each in entry}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: chat_template must be a text or a list of name and template"
        ) from error
    if not all(isinstance(text, str) for text in (*templates, *templates.values())):
        raise ConfigError(f"{path}: names and templates of chat_template must be texts")
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # among them those for bytes that are no UTF-8
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}: must be an object")
    return content
