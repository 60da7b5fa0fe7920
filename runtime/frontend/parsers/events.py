"""What a parser makes of an output, in the order in which it was written."""

from typing import NamedTuple, Protocol, TypeAlias


class Content(NamedTuple):
    """The next piece of what is meant for the reader."""

    text: str


class Reasoning(NamedTuple):
    """The next piece of what the model thinks before it answers."""

    text: str


class CallStart(NamedTuple):
    """A call of a tool begins, the output's `place`th from 0 on; its arguments follow."""

    place: int
    name: str


class CallArguments(NamedTuple):
    """The next piece of the JSON text of a call's arguments."""

    place: int
    json: str


Event: TypeAlias = Content | Reasoning | CallStart | CallArguments


class OutputParser(Protocol):
    """Parses the text of one output. Put together, its events don't depend on the pieces."""

    def push(self, text: str) -> list[Event]:
        """What the next piece makes certain."""
        ...

    def finish(self) -> list[Event]:
        """What was held back: the output has ended. Nothing may be pushed after that."""
        ...


def join_events(events: list[Event]) -> list[Event]:
    """The same with one event for pieces that follow each other."""
    joined: list[Event] = []
    pieces: list[str] = []  # those of the last event, which isn't in `joined` yet
    last: Event | None = None
    for event in events:
        if last is not None and not _continues(last, event):
            joined.append(_with_text(last, pieces))
            pieces = []
        last = event
        pieces.append(_text(event))
    if last is not None:
        joined.append(_with_text(last, pieces))
    return joined


def _continues(last: Event, event: Event) -> bool:
    if isinstance(last, CallArguments) and isinstance(event, CallArguments):
        return last.place == event.place
    return type(last) is type(event) and not isinstance(event, CallStart)


def _text(event: Event) -> str:
    match event:
        case Content(text) | Reasoning(text) | CallArguments(_, text):
            return text
        case CallStart(_, name):
            return name


def _with_text(event: Event, pieces: list[str]) -> Event:
    match event:
        case Content():
            return Content("".join(pieces))
        case Reasoning():
            return Reasoning("".join(pieces))
        case CallArguments(place, _):
            return CallArguments(place, "".join(pieces))
        case CallStart():
            return event
