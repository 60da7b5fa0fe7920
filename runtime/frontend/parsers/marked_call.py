"""A call of a tool as FunctionGemma and Gemma 4 write it, without quotes but those of their own.

For instance <start_function_call>call:look{at:<escape>the door<escape>,days:3}<end_function_call>.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from runtime.frontend.parsers.events import CallStart
from runtime.frontend.parsers.json_call import Outcome
from runtime.frontend.parsers.json_text import escape, refuse_constant
from runtime.frontend.parsers.reading import Output, Read, read_marker, read_until, skip_space

_CALL = "call:"
_BRACKETS = {"{": "}", "[": "]"}
_NOT_IN_KEYS = frozenset("{}[],\n")
_ENDS_OF_VALUES = frozenset(",}]")
_CONSTANTS = ("true", "false", "null")


class Marks(NamedTuple):
    """The special tokens that one model has for calls."""

    opening: str
    closing: str
    quote: str


def read_marked_call(output: Output, place: int, quote: str) -> Read[Outcome]:
    """Reads the call that begins here, after its opening mark; it is one once its name is read.

    What is no number, constant or quoted text is a text as well.
    """
    marker = yield from read_marker(output, (_CALL,))
    name = ""
    while marker == _CALL and output.char and output.char not in "{\n<":
        name += output.char
        yield
    if not name.strip() or output.char != "{":
        return Outcome.NO_CALL
    output.give(CallStart(place, name.strip()))
    give = partial(output.give_arguments, place)
    give("{")
    yield
    is_whole = yield from _read_entries(output, quote, give)
    return Outcome.CALL if is_whole else Outcome.BROKEN


def _read_entries(output: Output, quote: str, give: Callable[[str], None]) -> Read[bool]:
    """Gives an object after its bracket, as JSON. False: it breaks off."""
    closers = ["}"]
    separator = ""
    while closers:
        yield from skip_space(output)
        if output.char == closers[-1]:
            give(closers.pop())
            separator = ", "
            yield
            continue
        if not output.char or output.char in _BRACKETS.values():
            return False
        if output.char == ",":
            yield
            continue
        give(separator)
        separator = ", "
        if closers[-1] == "}" and not (yield from _read_key(output, quote, give)):
            return False
        if output.char in _BRACKETS:
            give(output.char)
            closers.append(_BRACKETS[output.char])
            separator = ""
            yield
        elif not (yield from _read_value(output, quote, give)):
            return False
    return True


def _read_key(output: Output, quote: str, give: Callable[[str], None]) -> Read[bool]:
    """Gives a key, which may be quoted, and its colon."""
    key = yield from read_marker(output, (quote,))
    while output.char and output.char != ":" and output.char not in _NOT_IN_KEYS:
        key += output.char
        yield
    if output.char != ":":
        give(key)
        return False
    key = key.strip().removeprefix(quote).removesuffix(quote)
    give(f'"{escape(key)}": ')
    yield
    yield from skip_space(output)
    return True


def _read_value(output: Output, quote: str, give: Callable[[str], None]) -> Read[bool]:
    text = yield from read_marker(output, (quote,))
    if text == quote:
        give('"')
        found = yield from read_until(output, (quote,), lambda piece: give(escape(piece)))
        give(escape(found.space) + ('"' if found.marker else ""))
        return bool(found.marker)
    while output.char and output.char not in _ENDS_OF_VALUES:
        text += output.char
        yield
    if not output.char or not text.strip():
        give(text)
        return False
    give(_as_json(text.strip()))
    return True


def _as_json(text: str) -> str:
    if text in _CONSTANTS:
        return text
    try:
        number = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        number = None
    is_number = isinstance(number, int | float) and text[0] in "-0123456789"
    return text if is_number else f'"{escape(text)}"'
