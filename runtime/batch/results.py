"""The files of answers and of errors: a whole line at a time, each line of the input once."""

import fcntl
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from runtime.batch.ledger import Ledger
from runtime.errors import ConfigError

_ID = re.compile(r"batch_req_([1-9]\d{0,17})")


def result_id(line: int) -> str:
    return f"batch_req_{line}"


class ResultFile:
    """Lines of JSON, appended to what an earlier run has left. Close it.

    Raises ConfigError: it can't be written, or another run writes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"output={str(path)!r} can't be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise ConfigError(
                f"output={str(path)!r} is written by another run: wait for its end"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)

    def recover(self, ledger: Ledger) -> int:
        """Marks the lines that are finished, cuts off a torn last one; returns how many there are.

        Raises ConfigError: a line is no result; the file is unchanged.
        """
        count = end = 0
        with self._path.open("rb") as file:
            for number, content in enumerate(file, 1):
                if not content.endswith(b"\n"):
                    break
                line, custom_id = self._read(number, content)
                if not ledger.finish(line, custom_id):
                    raise ConfigError(
                        f"output={str(self._path)!r}, line {number}: {result_id(line)} is there "
                        "twice; give another output"
                    )
                count += 1
                end += len(content)
        os.ftruncate(self._file, end)
        return count

    def write(self, result: Mapping[str, Any]) -> None:
        """Raises ConfigError: the disk takes no more; a later run cuts off what it took."""
        content = memoryview(json.dumps(result).encode() + b"\n")
        try:
            while content:
                content = content[os.write(self._file, content) :]
        except OSError as error:
            raise ConfigError(
                f"output={str(self._path)!r} can't be written: {error.strerror}"
            ) from error

    def _read(self, number: int, content: bytes) -> tuple[int, str | None]:
        try:
            result = json.loads(content)
            found = _ID.fullmatch(result["id"])
            custom_id = result["custom_id"]
        except (ValueError, RecursionError, KeyError, TypeError):
            found, custom_id = None, None
        if found is None or not isinstance(custom_id, str | None):
            raise ConfigError(
                f"output={str(self._path)!r}, line {number} isn't a result of a batch: "
                "give another output"
            )
        return int(found[1]), custom_id
