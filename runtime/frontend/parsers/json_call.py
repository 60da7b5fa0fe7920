"""A call of a tool as JSON: {"name": "look", "arguments": {"far": true}}."""

from collections.abc import Callable
from enum import Enum, auto

from runtime.frontend.parsers.events import CallStart
from runtime.frontend.parsers.json_text import (
    ObjectScanner,
    StringDecoder,
    read_object,
    read_rest_of_object,
    read_string,
)
from runtime.frontend.parsers.reading import Output, Read, skip_space

_ARGUMENTS = ("arguments", "parameters")
_NOTES = ("type", "id")  # texts that some models write beside a call


class Outcome(Enum):
    """What the text from a bracket on has turned out to be."""

    NO_CALL = auto()  # nothing was given
    CALL = auto()
    BROKEN = auto()  # a call whose arguments break off; what follows is for them too


class Call:
    """One call: given once its name is known and its arguments have begun."""

    def __init__(self, output: Output, place: int) -> None:
        self._output = output
        self._place = place
        self._name: str | None = None
        self._held: list[str] = []  # arguments before the name
        self.has_arguments = False

    @property
    def is_given(self) -> bool:
        return self._name is not None and self.has_arguments

    def set_name(self, name: str) -> None:
        self._name = name
        if self.has_arguments:
            self._start("".join(self._held))

    def give(self, piece: str) -> None:
        """The next piece of the arguments."""
        is_first, self.has_arguments = not self.has_arguments, True
        if self._name is None:
            self._held.append(piece)
        elif is_first:
            self._start(piece)
        else:
            self._output.give_arguments(self._place, piece)

    def give_none(self) -> bool:
        """The call has no arguments; False: it has no name either."""
        if self._name is None:
            return False
        self.give("{}")
        return True

    def _start(self, piece: str) -> None:
        assert self._name is not None
        self._output.give(CallStart(self._place, self._name))
        self._output.give_arguments(self._place, piece)


def read_call(output: Output, place: int, *, needs_arguments: bool) -> Read[Outcome]:
    """Reads the object that begins here. Keys come in any order, arguments as object or text.

    It is a call, or none, as soon as name and arguments have begun: an unknown key before that, or
    a value of another type, makes it none. What comes after the two isn't given.
    """
    call = Call(output, place)
    yield
    while True:
        yield from skip_space(output)
        if output.char == "}" and not needs_arguments and not call.has_arguments:
            if not call.give_none():
                return Outcome.NO_CALL
            yield
            return Outcome.CALL
        if output.char == ",":
            yield
            continue
        is_whole = yield from _read_entry(output, call)
        if not call.is_given and not is_whole:
            return Outcome.NO_CALL
        if not is_whole:
            return Outcome.BROKEN
        if call.is_given:
            yield from read_rest_of_object(output)
            return Outcome.CALL


def _read_entry(output: Output, call: Call) -> Read[bool]:
    """Reads a key and its value. False: it is none of a call, or breaks off."""
    key = yield from read_string(output)
    are_arguments = key in _ARGUMENTS and not call.has_arguments
    if not are_arguments and key != "name" and key not in _NOTES:
        return False
    yield from skip_space(output)
    if output.char != ":":
        return False
    yield
    yield from skip_space(output)
    if are_arguments:
        return (yield from _read_arguments(output, call.give))
    value = yield from read_string(output)
    if key == "name" and value:
        call.set_name(value)
    return value is not None


def _read_arguments(output: Output, give: Callable[[str], None]) -> Read[bool]:
    if output.char == "{":
        return (yield from read_object(output, give))
    if output.char != '"':
        return False
    yield
    decoder, scanner = StringDecoder(), ObjectScanner()
    while not decoder.ends_with(output.char):
        text = decoder.feed(output.char) if output.char else None
        if text is None or not _give_decoded(text, scanner, give):
            return False
        yield
    yield
    return scanner.has_ended


def _give_decoded(text: str, scanner: ObjectScanner, give: Callable[[str], None]) -> bool:
    """False: it isn't the text of one object."""
    for char in text:
        if scanner.is_outside and char.isspace():
            continue
        if scanner.is_outside and (char != "{" or scanner.has_ended):
            return False
        piece = scanner.feed(char)
        if piece is None:
            return False
        give(piece)
    return True
