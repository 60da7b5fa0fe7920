"""Reads an output one character at a time, so that the pieces it comes in make no difference.

How a format is read is a generator: it looks at `output.char`, gives what that makes certain, and
yields once the character is read and the next one is wanted.
"""

from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias, TypeVar

from runtime.frontend.parsers.events import CallArguments, Content, Event, join_events

_T = TypeVar("_T")
Read: TypeAlias = Generator[None, None, _T]


class Output:
    """The next character of an output, and what has been made of those before it."""

    def __init__(self) -> None:
        self.char = ""  # "" at the end
        self._events: list[Event] = []
        self._seen: list[str] | None = None

    def advance(self, char: str) -> None:
        """The next character has been read, and `char` follows it."""
        if self._seen is not None:
            self._seen.append(self.char)
        self.char = char

    def give(self, event: Event) -> None:
        self._events.append(event)

    def give_content(self, text: str) -> None:
        if text:
            self.give(Content(text))

    def give_arguments(self, place: int, json: str) -> None:
        if json:
            self.give(CallArguments(place, json))

    def take(self) -> list[Event]:
        """What has been given since the last call."""
        events, self._events = self._events, []
        return join_events(events)

    def mark(self) -> None:
        """Begins to keep what is read, from the next character on."""
        self._seen = []

    def since_mark(self) -> str:
        """What has been read since the mark, which is removed."""
        seen, self._seen = self._seen, None
        assert seen is not None
        return "".join(seen)


class CharacterParser:
    """Parses one output as `read` reads it; what follows its end is content."""

    def __init__(self, read: Callable[[Output], Read[None]]) -> None:
        self._output = Output()
        self._read = read(self._output)
        self._has_ended = False

    def push(self, text: str) -> list[Event]:
        """What the next piece makes certain."""
        for place, char in enumerate(text):
            if self._has_ended or self._reads_to_its_end(char):
                self._output.give_content(text[place:])
                break
        return self._output.take()

    def finish(self) -> list[Event]:
        """What was held back: the output has ended."""
        if not self._has_ended:
            has_ended = self._reads_to_its_end("")
            assert has_ended, "a reader wants more than there is"
        return self._output.take()

    def _reads_to_its_end(self, char: str) -> bool:
        """Whether `char` is the first one that isn't the reader's."""
        self._output.advance(char)
        try:
            next(self._read)
        except StopIteration:
            self._has_ended = True
        return self._has_ended


class Found(NamedTuple):
    """What ended a text."""

    marker: str  # "" where the output has ended
    space: str  # white space before it, which hasn't been given


def read_until(
    output: Output, markers: tuple[str, ...], give: Callable[[str], None], *, space: str = ""
) -> Read[Found]:
    """Gives what stands before a marker, and reads the marker.

    Nothing is held back but white space and what may be the beginning of a marker. `space` is what
    was read before. No marker begins with white space, or is the beginning of another one.
    """
    held = ""
    while output.char:
        held += output.char
        while held and not any(marker.startswith(held) for marker in markers):
            space += held[0]
            if not held[0].isspace():
                give(space)
                space = ""
            held = held[1:]
        yield
        if held in markers:
            return Found(held, space)
    if held:
        give(space + held)
        space = ""
    return Found("", space)


def read_marker(output: Output, markers: tuple[str, ...]) -> Read[str]:
    """Reads as much as begins a marker; a whole one, or else what was no marker's."""
    held = ""
    while output.char and any(marker.startswith(held + output.char) for marker in markers):
        held += output.char
        yield
        if held in markers:
            break
    return held


def skip_space(output: Output) -> Read[None]:
    while output.char.isspace():
        yield
