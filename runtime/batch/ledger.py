"""What is known of the lines, on disk: a file of any size takes no more memory."""

import hashlib
import sqlite3
from typing import Self

from runtime.errors import ConfigError


class Ledger:
    """Finished lines, and which line had a custom_id first. Close it; for one thread."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)  # a temporary file
        self._database.execute("PRAGMA journal_mode=OFF")
        self._database.execute("CREATE TABLE finished (line INTEGER PRIMARY KEY, id BLOB)")
        self._database.execute("CREATE TABLE seen (id BLOB PRIMARY KEY, line INT) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def finish(self, line: int, custom_id: str | None) -> bool:
        """Marks a line; whether it wasn't finished before."""
        done = self._database.execute(
            "INSERT OR IGNORE INTO finished VALUES (?, ?)", (line, _digest(custom_id))
        )
        return done.rowcount == 1

    def is_finished(self, line: int, custom_id: str | None) -> bool:
        """Raises ConfigError: it is, with another custom_id."""
        found = self._database.execute("SELECT id FROM finished WHERE line = ?", (line,)).fetchone()
        if found is None:
            return False
        if found[0] != _digest(custom_id):
            raise ConfigError(
                f"output belongs to another input: line {line} has custom_id={custom_id!r}, and "
                "its result another one; give another output"
            )
        return True

    def first_line_of(self, custom_id: str, line: int) -> int:
        """The line that had the custom_id first; `line` itself if none had."""
        self._database.execute(
            "INSERT OR IGNORE INTO seen VALUES (?, ?)", (_digest(custom_id), line)
        )
        found = self._database.execute(
            "SELECT line FROM seen WHERE id = ?", (_digest(custom_id),)
        ).fetchone()
        return int(found[0])


def _digest(custom_id: str | None) -> bytes | None:
    if custom_id is None:
        return None
    return hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).digest()
