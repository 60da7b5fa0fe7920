"""What a model thinks, between tags before its answer."""

from runtime.frontend.parsers.events import Content, Event, OutputParser, Reasoning
from runtime.frontend.parsers.reading import (
    CharacterParser,
    Output,
    Read,
    read_marker,
    read_until,
    skip_space,
)

OPENING = "<think>"
CLOSING = "</think>"


class ThinkingParser:
    """Parses what precedes the answer, and leaves that to another parser."""

    def __init__(self, answer: OutputParser, *, starts_inside: bool) -> None:
        """`starts_inside`: the prompt ends with the opening tag."""
        self._thoughts = CharacterParser(lambda output: _read_thoughts(output, starts_inside))
        self._answer = answer

    def push(self, text: str) -> list[Event]:
        """What the next piece makes certain."""
        return self._parse_answer(self._thoughts.push(text))

    def finish(self) -> list[Event]:
        """What was held back: the output has ended."""
        return [*self._parse_answer(self._thoughts.finish()), *self._answer.finish()]

    def _parse_answer(self, events: list[Event]) -> list[Event]:
        parsed: list[Event] = []
        for event in events:
            parsed += self._answer.push(event.text) if isinstance(event, Content) else [event]
        return parsed


def _read_thoughts(output: Output, starts_inside: bool) -> Read[None]:
    """Neither line breaks after the opening tag nor white space around the closing one is given."""
    output.mark()
    yield from skip_space(output)
    marker = yield from read_marker(output, (OPENING, CLOSING))
    seen = output.since_mark()
    if marker != OPENING and not starts_inside:
        output.give_content(seen)
        return
    if marker != CLOSING:
        yield from _read_inside(output, "" if marker == OPENING else seen.lstrip("\n"))
    yield from skip_space(output)


def _read_inside(output: Output, begun: str) -> Read[None]:
    """`begun` was read before."""

    def give(text: str) -> None:
        if text:
            output.give(Reasoning(text))

    while not begun and output.char == "\n":
        yield
    is_text = bool(begun.strip())
    give(begun if is_text else "")
    space = "" if is_text else begun
    found = yield from read_until(output, (CLOSING,), give, space=space)
    if not found.marker:
        give(found.space)
