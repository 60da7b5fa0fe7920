"""Reads a file of requests line by line, none longer than a limit."""

import hashlib
import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from runtime.errors import ConfigError, InvalidRequestError

CHUNK_BYTES = 1 << 20
MAX_ID_CHARACTERS = 512
DIGEST_CHARACTERS = 12


class RawLine(NamedTuple):
    """A line that isn't blank."""

    number: int  # from 1, blank ones counted
    content: bytes  # the first of it where it is too long
    is_too_long: bool = False

    @property
    def digest(self) -> str:
        """Another where the line is changed."""
        return hashlib.sha256(self.content.strip()).hexdigest()[:DIGEST_CHARACTERS]


class BatchRequest(NamedTuple):
    """What a good line asks for."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def check_input(path: Path) -> None:
    """Raises ConfigError: it is no regular file."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _cannot_read(path, error) from error
    if not stat.S_ISREG(mode):
        raise ConfigError(
            f"input={str(path)!r} must be a regular file, as it is read twice: "
            "write the requests to one first"
        )


def read_lines(path: Path, max_bytes: int) -> Iterator[RawLine]:
    """Raises ConfigError: the file can't be read, or is no regular one."""
    check_input(path)
    try:
        with path.open("rb") as file:
            number = 0
            while content := file.readline(max_bytes + 1):
                number += 1
                if len(content) > max_bytes and not content.endswith(b"\n"):
                    _skip_rest(file)
                    yield RawLine(number, content, is_too_long=True)
                elif content.strip():
                    yield RawLine(number, content)
    except OSError as error:
        raise _cannot_read(path, error) from error


def parse(line: RawLine, max_bytes: int) -> dict[str, Any]:
    """The line's object. Raises InvalidRequestError: it is none, or too long."""
    if line.is_too_long:
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


def _cannot_read(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"input={str(path)!r} can't be read: {error.strerror}")


def _skip_rest(file: BinaryIO) -> None:
    while (chunk := file.readline(CHUNK_BYTES)) and not chunk.endswith(b"\n"):
        pass
