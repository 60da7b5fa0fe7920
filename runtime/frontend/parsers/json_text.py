"""JSON that comes character by character: where an object ends, and what a string says."""

import json
from collections.abc import Callable

from runtime.frontend.parsers.reading import Output, Read

# JSON has no others outside of strings.
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-.,: \t\r\n")
_UNICODE_ESCAPE_LEN = 6


class ObjectScanner:
    """Follows an object to its closing bracket. What its values are isn't checked."""

    def __init__(self, *, depth: int = 0) -> None:
        """`depth`: how many brackets are open."""
        self._depth = depth
        self._is_in_string = False
        self._is_escaped = False
        self.has_ended = False

    @property
    def is_outside(self) -> bool:
        """Whether it hasn't begun, or has ended."""
        return self._depth == 0

    def feed(self, char: str) -> str | None:
        """`char` as JSON has it, or None where it can't stand there.

        Line breaks and other control characters in strings, which JSON forbids, are escaped.
        """
        if self._is_in_string:
            return self._feed_string(char)
        if char == '"':
            self._is_in_string = True
        elif char in ("{", "["):
            self._depth += 1
        elif char in ("}", "]"):
            self._depth -= 1
            self.has_ended = self._depth == 0
        elif char not in _PLAIN:
            return None
        return char

    def _feed_string(self, char: str) -> str:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
        return char if char >= " " else escape(char)


class StringDecoder:
    """What the characters between a string's quotes say."""

    def __init__(self) -> None:
        self._escape = ""

    def ends_with(self, char: str) -> bool:
        """Whether `char` is the closing quote."""
        return char == '"' and not self._escape

    def feed(self, char: str) -> str | None:
        """The next text, "" inside an escape, None where `char` can't stand there.

        A surrogate stays an escape: it may be half of a pair, or no character at all.
        """
        if not self._escape and char != "\\":
            return char
        self._escape += char
        if len(self._escape) == 1 or (
            self._escape[1] == "u" and len(self._escape) < _UNICODE_ESCAPE_LEN
        ):
            return ""
        whole, self._escape = self._escape, ""
        try:
            text: str = json.loads(f'"{whole}"')
        except ValueError:
            return None
        return whole if "\ud800" <= text <= "\udfff" else text


def escape(text: str) -> str:
    """`text` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def refuse_constant(name: str) -> None:
    """For json.loads, which takes NaN and Infinity by itself."""
    raise ValueError(f"{name} is no JSON")


def read_object(output: Output, give: Callable[[str], None]) -> Read[bool]:
    """Gives the object that begins here. False: it breaks off, at what can't stand in it."""
    scanner = ObjectScanner()
    while output.char:
        piece = scanner.feed(output.char)
        if piece is None:
            return False
        give(piece)
        yield
        if scanner.has_ended:
            return True
    return False


def read_rest_of_object(output: Output) -> Read[None]:
    """Reads up to the closing bracket of an object, or to what can't stand in it."""
    scanner = ObjectScanner(depth=1)
    while output.char and scanner.feed(output.char) is not None:
        yield
        if scanner.has_ended:
            return


def read_string(output: Output) -> Read[str | None]:
    """Reads a string, such as a name; None where there is none that a text could hold."""
    if output.char != '"':
        return None
    raw = ['"']
    is_escaped = False
    yield
    while output.char >= " ":
        char = output.char
        raw.append(char)
        yield
        if char == '"' and not is_escaped:
            return _decode("".join(raw))
        is_escaped = char == "\\" and not is_escaped
    return None


def _decode(raw: str) -> str | None:
    try:
        text: str = json.loads(raw)
        text.encode()  # a lone surrogate can't be sent to anyone
    except ValueError:
        return None
    return text
