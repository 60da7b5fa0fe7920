"""The files of answers and of errors: a whole line at a time, each line of the input once."""

import fcntl
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from runtime.batch.ledger import Finished, Ledger
from runtime.batch.lines import DIGEST_CHARACTERS, RawLine
from runtime.errors import ConfigError, InvalidRequestError

# An answer is in memory as it is written, and as it is read again.
MAX_RESULT_BYTES = 256 << 20
# Earlier versions wrote no digest.
_ID = re.compile(rf"batch_req_([1-9]\d{{0,17}})(?:_([0-9a-f]{{{DIGEST_CHARACTERS}}}))?")
_START = b'{"id": "batch_req_'


def result_id(line: RawLine) -> str:
    """Says which line it is of, and what that was."""
    return f"batch_req_{line.number}_{line.digest}"


class ResultFile:
    """Lines of JSON, appended to what an earlier run has left. Close it.

    `option` is what messages call it. Raises ConfigError: it can't be written, is no regular file,
    or another run writes it.
    """

    def __init__(self, path: Path, *, option: str, max_bytes: int = MAX_RESULT_BYTES) -> None:
        """No line is longer than `max_bytes`."""
        self._path = path
        self._name = f"{option}={str(path)!r}"
        self._max_bytes = max_bytes
        self._failure: ConfigError | None = None
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"{self._name} can't be opened: {error.strerror}") from error
        try:
            self._check_kind()
            self._lock()
        except ConfigError:
            os.close(self._file)
            raise

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
            while content := file.readline(self._max_bytes + 1):
                number = count + 1
                if not content.endswith(b"\n"):
                    self._check_torn(number, content)
                    break
                finished = self._read(number, content)
                if not ledger.finish(finished):
                    raise ConfigError(
                        f"{self._name}, line {number}: line {finished.line} of the input has a "
                        "result already; give another output"
                    )
                count = number
                end += len(content)
        os.ftruncate(self._file, end)
        return count

    def write(self, result: Mapping[str, Any]) -> None:
        """Raises InvalidRequestError: it is too long; the file is unchanged.

        Raises ConfigError: the disk takes no more; nothing else is written, and a later run cuts
        off what the disk took.
        """
        if self._failure is not None:
            # What comes before the run ends would stand on the torn line.
            raise self._failure
        content = memoryview(json.dumps(result).encode() + b"\n")
        if len(content) > self._max_bytes:
            raise InvalidRequestError(
                f"the answer of {len(content)} bytes is longer than {self._max_bytes}: ask for "
                "fewer tokens, choices or logprobs"
            )
        try:
            while content:
                content = content[os.write(self._file, content) :]
        except OSError as error:
            self._failure = ConfigError(
                f"{self._name} can't be written: {error.strerror}; once it can, the same command "
                "does the rest"
            )
            raise self._failure from error

    def _check_kind(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise ConfigError(
                f"{self._name} must be a regular file, as a rerun reads it: give a path of one"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{self._name} is written by another run: wait for its end"
            ) from error

    def _read(self, number: int, content: bytes) -> Finished:
        try:
            result = json.loads(content)
            found = _ID.fullmatch(result["id"])
            custom_id = result["custom_id"]
        except (ValueError, RecursionError, KeyError, TypeError):
            found, custom_id = None, None
        if found is None or not isinstance(custom_id, str | None):
            raise self._foreign(number)
        return Finished(int(found[1]), custom_id, found[2])

    def _check_torn(self, number: int, content: bytes) -> None:
        """What is cut off must be ours: a wrong path shouldn't cost someone a file."""
        if len(content) > self._max_bytes or not content.startswith(_START[: len(content)]):
            raise self._foreign(number)

    def _foreign(self, number: int) -> ConfigError:
        return ConfigError(
            f"{self._name}, line {number} isn't a result of a batch: give another path"
        )
