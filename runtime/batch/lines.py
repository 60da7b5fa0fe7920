"""Reads a file of requests line by line, none longer than a limit."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from runtime.errors import ConfigError, InvalidRequestError

CHUNK_BYTES = 1 << 20
MAX_ID_CHARACTERS = 512


class RawLine(NamedTuple):
    """A line that isn't blank."""

    number: int  # from 1, blank ones counted
    content: bytes | None  # None where it is too long


class BatchRequest(NamedTuple):
    """What a good line asks for."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def read_lines(path: Path, max_bytes: int) -> Iterator[RawLine]:
    """Raises ConfigError: the file can't be read."""
    try:
        with path.open("rb") as file:
            number = 0
            while content := file.readline(max_bytes + 1):
                number += 1
                if len(content) > max_bytes and not content.endswith(b"\n"):
                    _skip_rest(file)
                    yield RawLine(number, None)
                elif content.strip():
                    yield RawLine(number, content)
    except OSError as error:
        raise ConfigError(f"input={str(path)!r} can't be read: {error.strerror}") from error


def count_lines(path: Path, max_bytes: int) -> int:
    """Those that `read_lines` gives. Raises ConfigError: the file can't be read."""
    return sum(1 for _ in read_lines(path, max_bytes))


def parse(line: RawLine, max_bytes: int) -> dict[str, Any]:
    """The line's object. Raises InvalidRequestError: it is none, or too long."""
    if line.content is None:
        raise InvalidRequestError(f"the line is longer than max_body_bytes={max_bytes}")
    try:
        fields = json.loads(line.content)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the line isn't JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError("the line must be a JSON object")
    return fields


def custom_id_of(fields: Mapping[str, Any]) -> str:
    """Raises InvalidRequestError: there is none that can be used."""
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARACTERS:
        raise InvalidRequestError(
            f"custom_id must be a string of 1 to {MAX_ID_CHARACTERS} characters"
        )
    return custom_id


def check(custom_id: str, fields: Mapping[str, Any]) -> BatchRequest:
    """The request of a line. Raises InvalidRequestError: a field is wrong."""
    if fields.get("method") != "POST":
        raise InvalidRequestError('method must be "POST"')
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str):
        raise InvalidRequestError("url must be a string")
    if not isinstance(body, dict):
        raise InvalidRequestError("body must be a JSON object")
    return BatchRequest(custom_id, url, body)


def _skip_rest(file: BinaryIO) -> None:
    while (chunk := file.readline(CHUNK_BYTES)) and not chunk.endswith(b"\n"):
        pass
