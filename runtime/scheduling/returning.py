"""Blocks on their way back: nobody holds them any more, but steps in flight may use them."""

from collections.abc import Callable
from typing import NamedTuple


class _Entry(NamedTuple):
    until: int  # the last step that may use them
    tables: list[list[int]]
    give_back: Callable[[], None]


class ReturningBlocks:
    """Gives blocks back in the order in which they were given up, each after its last step."""

    def __init__(self) -> None:
        self.last_step_id = 0  # that went to the workers
        self.acknowledged_step_id = 0
        self._entries: list[_Entry] = []

    def put(self, tables: list[list[int]], until: int, give_back: Callable[[], None]) -> None:
        """Calls `give_back` once step `until` is acknowledged, which may be at once."""
        if until <= self.acknowledged_step_id:
            give_back()
        else:
            self._entries.append(_Entry(until, tables, give_back))

    def acknowledge(self, step_id: int) -> None:
        """A step and all before it have ended."""
        self.acknowledged_step_id = step_id
        if not self._entries:
            return
        entries, self._entries = self._entries, []
        for each in entries:
            self.put(each.tables, each.until, each.give_back)

    def tables(self) -> list[list[int]]:
        return [table for each in self._entries for table in each.tables]

    def clear(self) -> list[list[int]]:
        """Steps count from 1 again; returns the tables that nothing was done for."""
        tables = self.tables()
        self._entries = []
        self.last_step_id = self.acknowledged_step_id = 0
        return tables
