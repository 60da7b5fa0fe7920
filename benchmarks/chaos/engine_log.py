"""What a server's log says of its workers' ends and returns."""

import asyncio
import json
import threading
from collections.abc import Iterable
from datetime import datetime
from typing import Literal, NamedTuple, TextIO

LOST, BACK = "the workers are lost: ", "the workers are back"
LOOK_S = 0.02
ENGINE = "runtime.engine"


class Event(NamedTuple):
    """A line of the engine's."""

    at: float  # as `time.time` tells
    kind: Literal["lost", "back"]
    message: str


class EngineLog:
    """Reads a log of JSON lines on a thread of its own, to the end; a copy goes to `copy`."""

    def __init__(self, lines: Iterable[str], copy: TextIO) -> None:
        self.events: list[Event] = []
        self.has_ended = False
        self._lines = lines
        self._copy = copy
        self._thread = threading.Thread(target=self._read, name="engine log", daemon=True)
        self._thread.start()

    async def wait_for(self, kind: str, *, after: int, timeout_s: float) -> Event | None:
        """The first event of this kind after so many events; None: there was none in time.

        Raises RuntimeError: the log has ended.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    found = [each for each in self.events[after:] if each.kind == kind]
                    if found:
                        return found[0]
                    if self.has_ended:
                        raise RuntimeError("the server ended while faults befell it")
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            return None

    def close(self) -> None:
        """Waits for its end: its writers are gone."""
        self._thread.join()

    def _read(self) -> None:
        for line in self._lines:
            self._copy.write(line)
            self._copy.flush()
            event = event_of(line)
            if event is not None:
                self.events.append(event)
        self.has_ended = True


def event_of(line: str) -> Event | None:
    """None: the line is of something else, such as a worker."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("logger") != ENGINE:
        return None
    at, message = datetime.fromisoformat(record["time"]).timestamp(), record["message"]
    if message.startswith(LOST):
        return Event(at, "lost", message.removeprefix(LOST))
    return Event(at, "back", message) if message.startswith(BACK) else None
