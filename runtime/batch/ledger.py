"""What is known of the lines, on disk: a file of any size takes no more memory."""

import hashlib
import sqlite3
from collections.abc import Iterable
from typing import NamedTuple, Self

from runtime.batch.lines import RawLine
from runtime.errors import ConfigError


class Finished(NamedTuple):
    """A line that has a result."""

    line: int
    custom_id: str | None
    digest: str | None  # None where an earlier version has written the result


class Ledger:
    """Finished lines, and which line had a custom_id first. Close it; for one thread.

    All methods raise ConfigError: the folder of temporary files is full.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)  # a temporary file
        self._ask("PRAGMA journal_mode=OFF")
        self._ask("CREATE TABLE finished (line INTEGER PRIMARY KEY, id BLOB, digest TEXT)")
        self._ask("CREATE TABLE seen (id BLOB PRIMARY KEY, line INT) WITHOUT ROWID")
        self._ask("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def finish(self, finished: Finished) -> bool:
        """Marks a line; whether it wasn't finished before."""
        done = self._ask(
            "INSERT OR IGNORE INTO finished VALUES (?, ?, ?)",
            finished.line,
            _digest(finished.custom_id),
            finished.digest,
        )
        return done.rowcount == 1

    def match(self, lines: Iterable[RawLine]) -> int:
        """How many lines there are, in their order; none of them is asked for its custom_id.

        Raises ConfigError: a finished one isn't among them, or was another.
        """
        count = 0
        finished = self._ask("SELECT line, digest FROM finished ORDER BY line")
        due = finished.fetchone()
        for line in lines:
            count += 1
            if due is None or line.number < due[0]:
                continue
            if line.number > due[0]:
                break
            _check_digest(line, due[1])
            due = finished.fetchone()
        if due is not None:
            raise ConfigError(
                f"output belongs to another input: it has a result of line {due[0]}, which isn't "
                "in this one; give another output, or the input as it was"
            )
        return count

    def is_finished(self, line: RawLine, custom_id: str | None) -> bool:
        """Raises ConfigError: it is, and was another line."""
        found = self._ask("SELECT id, digest FROM finished WHERE line = ?", line.number).fetchone()
        if found is None:
            return False
        if found[0] != _digest(custom_id):
            raise ConfigError(
                f"output belongs to another input: line {line.number} has "
                f"custom_id={custom_id!r}, and its result another one; give another output"
            )
        _check_digest(line, found[1])
        return True

    def first_line_of(self, custom_id: str, line: int) -> int:
        """The line that had the custom_id first; `line` itself if none had."""
        digest = _digest(custom_id)
        self._ask("INSERT OR IGNORE INTO seen VALUES (?, ?)", digest, line)
        return int(self._ask("SELECT line FROM seen WHERE id = ?", digest).fetchone()[0])

    def _ask(self, statement: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._database.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"the list of finished lines, a temporary file, can't be written: {error}; set "
                "SQLITE_TMPDIR to a folder with more room"
            ) from error


def _check_digest(line: RawLine, digest: str | None) -> None:
    if digest is not None and digest != line.digest:
        raise ConfigError(
            f"output belongs to another input: line {line.number} isn't the one that its result "
            "answers; give another output, or the input as it was"
        )


def _digest(custom_id: str | None) -> bytes | None:
    if custom_id is None:
        return None
    return hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).digest()
